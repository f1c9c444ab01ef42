"""Subcommands that run a model or describe one."""
