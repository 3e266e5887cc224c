"""What moves blocks between the tiers: demotion, promotion, drains, and what a restart brings back."""
