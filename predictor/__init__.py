"""How long will this answer be? Predictors of output length."""
