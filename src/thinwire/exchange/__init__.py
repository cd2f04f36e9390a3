"""How conversations travel: exchanges answer requests, lanes drive them."""
