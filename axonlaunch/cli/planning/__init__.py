"""Commands about layouts: estimate, plan, verify and schedule."""
