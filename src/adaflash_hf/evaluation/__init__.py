"""Measuring acceptance and speed."""
