"""Drafts of private tables of clients whose models differ (HPFL)."""
