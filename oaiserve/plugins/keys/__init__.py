"""Stored API keys with quotas."""
