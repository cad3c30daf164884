"""Killable workers: processes that run code of users for a service, and cost it one answer whatever they do."""
