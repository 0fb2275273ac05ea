"""Version v1alpha1 of the RLJob resource: one module per section of the spec."""

from rljob_api.v1alpha1.rljob import API_VERSION, KIND, ObjectMeta, RLJob, RLJobSpec

__all__ = ["API_VERSION", "KIND", "ObjectMeta", "RLJob", "RLJobSpec"]
