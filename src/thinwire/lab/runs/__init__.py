"""Training runs in processes of their own, and what they leave behind."""
