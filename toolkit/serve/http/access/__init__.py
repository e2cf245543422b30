"""Who asks: keys, users, the proxies that speak for them, and what each may use."""
