"""The RLJob operator: observes RLJobs and their RayJobs, decides, applies, writes one status."""
