"""What a pair of models would do on other hardware: a cost model of calls, and what follows from it."""
