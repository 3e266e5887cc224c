"""Who is served: tenants, their tokens, the file of what admins changed, the record of their acts."""
