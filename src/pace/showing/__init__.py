"""Explanations for people: figures and the report."""
