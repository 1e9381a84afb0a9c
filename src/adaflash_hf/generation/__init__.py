"""What happens inside `generate()`."""
