"""A real Kubernetes cluster on one Linux machine, from Go modules and Debian packages; no Docker, no image registry.

``python -m e2e.cluster --help`` shows the commands. Who calls what:

.. code-block:: text

    __main__ -> images.image    dockerfile (what it is made from) -> buildah -> node_images (the stock, or the node that is up)
             -> lifecycle.up    images.pause -> network -> node_images (files of the stock) -> containerd -> control_plane
                                -> node -> kuberay -> kueue
             -> lifecycle.api   control_plane (etcd, kube-apiserver, kube-controller-manager), no root needed
             -> lifecycle.down  cleanup: recorded processes, then what they left
    every step -> state (what was started or made, written down before it is made)

Everything a cluster has lies in one state folder; everything that is worth keeping lies in the cache (:mod:`e2e.cluster.paths`).
Any other cluster can be used through KUBECONFIG if :func:`e2e.cluster.guard.require_allowed_context` lets it.
"""
