"""What the commands do unless told otherwise. Without PyTorch, so that `thinwire --help` need not wait for it."""

DEFAULT_TASKS = ("mlp(width=1024)",)
DEFAULT_EXCHANGES = ("allreduce",)
DEFAULT_NETWORK = "auto:100mbit"
DEFAULT_OUTER = "nesterov(lr=0.7, momentum=0.8)"  # of local steps: chosen on other seeds than those compared on
LONGER = 1.2  # so many times the steps of the others: a step of local steps teaches less, and costs far less
SIMULATED_WORKERS = (8, 64, 512, 4096)
