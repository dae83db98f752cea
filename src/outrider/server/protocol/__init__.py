"""What may be asked, and what is answered, as Pydantic models."""
