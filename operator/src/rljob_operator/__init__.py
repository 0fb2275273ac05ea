"""The RLJob operator: observes RLJobs and their RayJobs, decides, acts, and writes one status."""
