"""From gigapixel files to arrays: reading, tissue, annotations, grid, labels, layouts."""
