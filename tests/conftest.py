from hypothesis import HealthCheck, settings

settings.register_profile(
    "agentd", deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("agentd")
