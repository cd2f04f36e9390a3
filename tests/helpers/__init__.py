"""What tests share: groups of processes, models, gradients, specs, made-up runs. No test imports another test."""
