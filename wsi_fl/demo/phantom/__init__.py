"""An archive of imaginary hospitals: H&E slides of lymph nodes, outlines of their metastases, labels.

It is laid out like Camelyon17 and needs no download, so that everything else can run on a fresh machine. The slides
are drawings: good for trying the software, never for claims about medicine.
"""

from wsi_fl.demo.phantom.archive import PhantomSlide, paint_archive, paint_slide, plan_slides, truth_mask
from wsi_fl.demo.phantom.tiff import write_pyramid

__all__ = [
    "PhantomSlide",
    "paint_archive",
    "paint_slide",
    "plan_slides",
    "truth_mask",
    "write_pyramid",
]
