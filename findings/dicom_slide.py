"""Write small DICOM slides of plain tiles, for scripts of this folder. Needs pydicom 3."""

from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, VLWholeSlideMicroscopyImageStorage, generate_uid

KIND = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
INDEX = [(0x0048021E, 0x0048021A), (0x0048021F, 0x0048021A), (0x00480106, 0x00480207)]
MM = 0.00025  # one pixel


def item(**values):
    """Return a dataset with these keywords."""
    dataset = Dataset()
    for keyword, value in values.items():
        setattr(dataset, keyword, value)
    return dataset


def write(path, organization, width, height, tiles, paths=1):
    """Write tiles of 256 x 256 px, each (x, y, optical path from 1 on, grey), as a slide of width x height px."""
    measures = item(PixelSpacing=[MM, MM], SliceThickness=0.001)
    kinds = item(FrameType=KIND)
    light = {"CodingSchemeDesignator": "DCM", "CodeValue": "111741", "CodeMeaning": "Transmission illumination"}
    glass = {"CodingSchemeDesignator": "SCT", "CodeValue": "433466003", "CodeMeaning": "Microscope slide"}
    specimen = item(
        SpecimenIdentifier="S", SpecimenUID=generate_uid(), SpecimenPreparationSequence=[],
        IssuerOfTheSpecimenIdentifierSequence=[],
    )  # fmt: skip
    slide = item(
        SOPClassUID=VLWholeSlideMicroscopyImageStorage, SOPInstanceUID=generate_uid(), StudyInstanceUID=generate_uid(),
        SeriesInstanceUID=generate_uid(), FrameOfReferenceUID=generate_uid(), PositionReferenceIndicator="SLIDE_CORNER",
        Modality="SM", PatientID="P", PatientName="P", PatientBirthDate="", PatientSex="", StudyID="",
        StudyDate="20260101", StudyTime="000000", AccessionNumber="", ReferringPhysicianName="", SeriesNumber=1,
        InstanceNumber=1, Manufacturer="M", ManufacturerModelName="M", DeviceSerialNumber="1", SoftwareVersions="1",
        ContentDate="20260101", ContentTime="000000", AcquisitionDateTime="20260101000000", ImageType=KIND,
        AcquisitionContextSequence=[], ContainerIdentifier="C", IssuerOfTheContainerIdentifierSequence=[],
        ContainerTypeCodeSequence=[item(**glass)], SpecimenDescriptionSequence=[specimen],
        SamplesPerPixel=3, PhotometricInterpretation="RGB", PlanarConfiguration=0, Rows=256, Columns=256,
        BitsAllocated=8, BitsStored=8, HighBit=7, PixelRepresentation=0, NumberOfFrames=len(tiles),
        TotalPixelMatrixColumns=width, TotalPixelMatrixRows=height, TotalPixelMatrixFocalPlanes=1,
        ImagedVolumeWidth=width * MM, ImagedVolumeHeight=height * MM, ImagedVolumeDepth=0.001,
        TotalPixelMatrixOriginSequence=[item(XOffsetInSlideCoordinateSystem=0, YOffsetInSlideCoordinateSystem=0)],
        ImageOrientationSlide=[0, 1, 0, 1, 0, 0], NumberOfOpticalPaths=paths,
        OpticalPathSequence=[
            item(OpticalPathIdentifier=str(n), IlluminationWaveLength=400.0 + 100 * n,
                 IlluminationTypeCodeSequence=[item(**light)])
            for n in range(1, paths + 1)
        ],
        BurnedInAnnotation="NO", LossyImageCompression="00", SpecimenLabelInImage="NO", FocusMethod="AUTO",
        ExtendedDepthOfField="NO", VolumetricProperties="VOLUME", DimensionOrganizationType=organization,
        DimensionOrganizationSequence=[item(DimensionOrganizationUID=generate_uid())],
        SharedFunctionalGroupsSequence=[
            item(PixelMeasuresSequence=[measures], WholeSlideMicroscopyImageFrameTypeSequence=[kinds])
        ],
    )  # fmt: skip
    if organization == "TILED_SPARSE":
        uid = slide.DimensionOrganizationSequence[0].DimensionOrganizationUID
        slide.DimensionIndexSequence = [
            item(DimensionIndexPointer=pointer, FunctionalGroupPointer=group, DimensionOrganizationUID=uid)
            for pointer, group in INDEX
        ]
        slide.PerFrameFunctionalGroupsSequence = list(places(tiles))
    slide.add_new("PixelData", "OB", b"".join(bytes([grey]) * (256 * 256 * 3) for *_, grey in tiles))
    slide.file_meta = FileMetaDataset()
    slide.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    slide.save_as(path, enforce_file_format=True)


def places(tiles):
    """Say of each frame where it lies and of which optical path it is."""
    columns, rows = (sorted({tile[axis] for tile in tiles}) for axis in (0, 1))
    for x, y, path, _ in tiles:
        position = item(
            ColumnPositionInTotalImagePixelMatrix=x + 1, RowPositionInTotalImagePixelMatrix=y + 1,
            XOffsetInSlideCoordinateSystem=y * MM, YOffsetInSlideCoordinateSystem=x * MM,
            ZOffsetInSlideCoordinateSystem=0,
        )  # fmt: skip
        yield item(
            PlanePositionSlideSequence=[position],
            OpticalPathIdentificationSequence=[item(OpticalPathIdentifier=str(path))],
            FrameContentSequence=[item(DimensionIndexValues=[columns.index(x) + 1, rows.index(y) + 1, path])],
        )
