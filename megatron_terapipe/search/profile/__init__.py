"""Measured times instead of computed ones: profiles that `measure` writes, and those that AMP's authors published."""

from megatron_terapipe.search.profile.factors import ProfileFactors, ScaledTimes
from megatron_terapipe.search.profile.files import read_profile, write_profile
from megatron_terapipe.search.profile.measured import MeasuredProfile
from megatron_terapipe.search.profile.physics import measured_physics
from megatron_terapipe.search.profile.profile import Profile

__all__ = [
    "MeasuredProfile",
    "Profile",
    "ProfileFactors",
    "ScaledTimes",
    "measured_physics",
    "read_profile",
    "write_profile",
]
