"""The endpoints: one router for each family. A router is made for a service."""
