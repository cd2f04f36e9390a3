"""What is trained: tasks, their data and models."""
