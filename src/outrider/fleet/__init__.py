"""Outrider's decisions inside engines that serve fleets."""
