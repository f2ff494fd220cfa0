"""Images through a backbone: observations in memory, in a store on disk, or made again whenever they are read."""
