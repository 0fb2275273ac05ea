"""The CustomResourceDefinition and the reference pages, from the models of :mod:`rljob_api.v1alpha1`."""
