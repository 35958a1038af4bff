"""Trains the demo model of deployments/demo_model."""
