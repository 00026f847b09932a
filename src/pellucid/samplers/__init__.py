"""Samplers turn prompts into groups of completions with the log-prob of every token."""
