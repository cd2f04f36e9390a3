"""What does the work. `reference` says what each operation means; the others do the same, faster."""
