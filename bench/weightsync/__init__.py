"""Weight syncs by transport and size beside bare copies, a file and pickled objects; sparse beside dense by what changed."""
