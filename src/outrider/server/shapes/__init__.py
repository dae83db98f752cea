"""What may be asked, and what is answered: one module for each family of endpoints."""
