//! Handwritten digits: reading a folder in MNIST's format, and making batches of it.
//!
//! ```text
//! {train,t10k}-images-idx3-ubyte[.gz], {train,t10k}-labels-idx1-ubyte[.gz]  ->  Digits  ->  DigitBatch<B>
//! ```

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::prelude::*;
use flate2::bufread::GzDecoder;

/// Height and width of an image.
pub(crate) const SIDE: usize = 28;
pub(crate) const NUM_CLASSES: usize = 10;
const NUM_PIXELS: usize = SIDE * SIDE;

type Pixels = [u8; NUM_PIXELS];

/// One image, `[28, 28]` row by row, 0 is background.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Digit {
    pixels: Pixels,
    /// Below [`NUM_CLASSES`].
    label: u8,
}

/// The two halves of a folder in MNIST's format.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    Train,
    Test,
}

/// All images of one part, in the order of the file. Clones share them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Digits(Arc<[Digit]>);

impl Digits {
    /// Reads one part of a folder: two files, each plain or gzipped.
    pub(crate) fn load(folder: &Path, part: Part) -> Result<Self> {
        let prefix = match part {
            Part::Train => "train",
            Part::Test => "t10k",
        };
        let images_name = format!("{prefix}-images-idx3-ubyte");
        let labels_name = format!("{prefix}-labels-idx1-ubyte");
        let (images, labels) = (read(folder, &images_name)?, read(folder, &labels_name)?);
        let in_folder = || format!("in {}", folder.display());
        let images = parse_images(&images).with_context(|| images_name).with_context(in_folder)?;
        let labels = parse_labels(&labels).with_context(|| labels_name).with_context(in_folder)?;
        Self::new(images, labels).with_context(in_folder)
    }

    fn new(images: &[Pixels], labels: &[u8]) -> Result<Self> {
        ensure!(
            images.len() == labels.len(),
            "{} images but {} labels: the two files do not belong together",
            images.len(),
            labels.len(),
        );
        ensure!(!images.is_empty(), "there are no images");
        Ok(Self(images.iter().zip(labels).map(|(&pixels, &label)| Digit { pixels, label }).collect()))
    }
}

impl Dataset<Digit> for Digits {
    fn get(&self, index: usize) -> Option<Digit> {
        self.0.get(index).cloned()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Images and labels on a device.
#[derive(Clone, Debug)]
pub(crate) struct DigitBatch<B: Backend> {
    /// `[batch, 1, 28, 28]`, with a mean near 0 and a deviation near 1.
    pub(crate) images: Tensor<B, 4>,
    /// `[batch]`, each below [`NUM_CLASSES`].
    pub(crate) labels: Tensor<B, 1, Int>,
}

/// Turns digits into tensors.
#[derive(Clone, Debug)]
pub(crate) struct DigitBatcher;

impl<B: Backend> Batcher<B, Digit, DigitBatch<B>> for DigitBatcher {
    fn batch(&self, digits: Vec<Digit>, device: &B::Device) -> DigitBatch<B> {
        // Of the shipped training images, in units of 255; those of the full MNIST are the same to three digits.
        const MEAN: f32 = 0.131;
        const DEVIATION: f32 = 0.308;
        let pixels = digits.iter().flat_map(|digit| digit.pixels);
        let pixels: Vec<f32> = pixels.map(|pixel| (f32::from(pixel) / 255.0 - MEAN) / DEVIATION).collect();
        let labels: Vec<i64> = digits.iter().map(|digit| i64::from(digit.label)).collect();
        DigitBatch {
            images: Tensor::from_data(TensorData::new(pixels, [digits.len(), 1, SIDE, SIDE]), device),
            labels: Tensor::from_data(TensorData::new(labels, [digits.len()]), device),
        }
    }
}

/// The content of a file, unpacked if need be.
fn read(folder: &Path, name: &str) -> Result<Vec<u8>> {
    let gzipped_name = format!("{name}.gz");
    for name in [name, &gzipped_name] {
        let path = folder.join(name);
        match fs::read(&path) {
            Ok(bytes) => return unpacked(bytes).with_context(|| path.display().to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }
    Err(anyhow!(
        "there is no {name} or {gzipped_name} in {}; a folder in MNIST's format holds train-images-idx3-ubyte, \
         train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each with or without .gz",
        folder.display(),
    ))
}

fn unpacked(bytes: Vec<u8>) -> Result<Vec<u8>> {
    const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
    if !bytes.starts_with(&GZIP_MAGIC) {
        return Ok(bytes);
    }
    let mut unpacked = Vec::new();
    let mut decoder = GzDecoder::new(&bytes[..]);
    // Reading to the end also compares the checksum and the length.
    decoder.read_to_end(&mut unpacked).context("the gzip data is truncated or damaged")?;
    let rest = decoder.into_inner();
    ensure!(rest.is_empty(), "{} bytes follow the end of the gzip data", rest.len());
    Ok(unpacked)
}

fn parse_images(file: &[u8]) -> Result<&[Pixels]> {
    let ([_, rows, columns], pixels) = parse_idx(file)?;
    ensure!([rows, columns] == [SIDE, SIDE], "images of {rows}x{columns} pixels, expected {SIDE}x{SIDE}");
    Ok(pixels.as_chunks().0)
}

fn parse_labels(file: &[u8]) -> Result<&[u8]> {
    let ([_], labels) = parse_idx(file)?;
    if let Some(index) = labels.iter().position(|&label| usize::from(label) >= NUM_CLASSES) {
        return Err(anyhow!("label {index} is {}, expected at most {}", labels[index], NUM_CLASSES - 1));
    }
    Ok(labels)
}

/// The dims of an IDX file of bytes, and its values: exactly as many as the dims say.
///
/// Source: the IDX format, at the end of the MNIST page by LeCun, Cortes and Burges.
fn parse_idx<const D: usize>(file: &[u8]) -> Result<([usize; D], &[u8])> {
    let (magic, mut rest) = file.split_first_chunk::<4>().context("truncated: too short for a magic number")?;
    let expected = [0, 0, 0x08, D as u8];
    ensure!(*magic == expected, "starts with {magic:02x?}, expected {expected:02x?} (bytes in {D} dimensions)");

    let mut dims = [0; D];
    for dim in &mut dims {
        let (bytes, after) = rest.split_first_chunk().context("truncated: the header is incomplete")?;
        *dim = u32::from_be_bytes(*bytes) as usize;
        rest = after;
    }
    let num_values = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    let num_values = num_values.with_context(|| format!("impossible dimensions {dims:?}"))?;
    ensure!(rest.len() >= num_values, "truncated: {dims:?} are {num_values} bytes, only {} follow", rest.len());
    ensure!(rest.len() == num_values, "{dims:?} are {num_values} bytes, but {} follow", rest.len());
    Ok((dims, rest))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use burn::tensor::backend::Backend;
    use burn_flex::Flex;
    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    const NUM_DIGITS: usize = 3;

    fn images_file() -> Vec<u8> {
        let mut file = vec![0, 0, 8, 3, 0, 0, 0, NUM_DIGITS as u8, 0, 0, 0, 28, 0, 0, 0, 28];
        file.extend((0..NUM_DIGITS * NUM_PIXELS).map(|i| (i % 251) as u8));
        file
    }

    fn labels_file() -> Vec<u8> {
        vec![0, 0, 8, 1, 0, 0, 0, NUM_DIGITS as u8, 7, 0, 9]
    }

    fn gzipped(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn parse(images: &[u8], labels: &[u8]) -> Result<Digits> {
        let (images, labels) = (unpacked(images.to_vec())?, unpacked(labels.to_vec())?);
        Digits::new(parse_images(&images)?, parse_labels(&labels)?)
    }

    fn error(result: Result<Digits>) -> String {
        format!("{:#}", result.expect_err("a damaged file must be refused"))
    }

    #[test]
    fn plain_and_gzipped_files_give_the_same_digits() {
        let digits = parse(&images_file(), &labels_file()).unwrap();
        assert_eq!(digits, parse(&gzipped(&images_file()), &gzipped(&labels_file())).unwrap());
        assert_eq!(digits.len(), NUM_DIGITS);
        let last = digits.get(2).unwrap();
        assert_eq!((last.label, last.pixels[0], last.pixels[1]), (9, (2 * 784 % 251) as u8, (1569 % 251) as u8));
        assert!(digits.get(3).is_none());
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let (images, labels) = (images_file(), labels_file());
        for (images, labels) in [(images.clone(), labels.clone()), (gzipped(&images), gzipped(&labels))] {
            (0..images.len()).for_each(|end| drop(error(parse(&images[..end], &labels))));
            (0..labels.len()).for_each(|end| drop(error(parse(&images, &labels[..end]))));
        }
        assert!(error(parse(&images[..images.len() - 1], &labels)).contains("truncated"));
        let gzipped = gzipped(&images);
        assert!(error(parse(&gzipped[..gzipped.len() - 1], &labels)).contains("truncated or damaged"));
    }

    #[test]
    fn a_flipped_bit_in_a_header_is_refused() {
        for bit in 0..16 * 8 {
            let mut images = images_file();
            images[bit / 8] ^= 1 << (bit % 8);
            error(parse(&images, &labels_file()));
        }
        for bit in 0..8 * 8 {
            let mut labels = labels_file();
            labels[bit / 8] ^= 1 << (bit % 8);
            error(parse(&images_file(), &labels));
        }
    }

    #[test]
    fn a_flipped_bit_in_gzipped_data_is_refused_or_changes_nothing() {
        // The time, the operating system, two hints for programs and the bits that fill up the last byte.
        const MAX_BITS_WITHOUT_DATA: usize = 64;
        let (images, digits) = (gzipped(&images_file()), parse(&images_file(), &labels_file()).unwrap());
        let mut num_accepted = 0;
        for bit in 0..images.len() * 8 {
            let mut images = images.clone();
            images[bit / 8] ^= 1 << (bit % 8);
            if let Ok(parsed) = parse(&images, &labels_file()) {
                assert_eq!(parsed, digits, "bit {bit} went unnoticed");
                num_accepted += 1;
            }
        }
        assert!(num_accepted <= MAX_BITS_WITHOUT_DATA, "{num_accepted}");
    }

    #[test]
    fn bytes_after_the_end_are_refused() {
        let mut images = images_file();
        images.push(0);
        assert!(error(parse(&images, &labels_file())).contains("but 2353 follow"));
        let mut images = gzipped(&images_file());
        images.extend([0; 5]);
        assert!(error(parse(&images, &labels_file())).contains("5 bytes follow"));
    }

    #[test]
    fn files_that_do_not_belong_together_are_refused() {
        let labels = [0, 0, 8, 1, 0, 0, 0, 2, 7, 0];
        assert!(error(parse(&images_file(), &labels)).contains("3 images but 2 labels"));
        assert!(error(parse(&labels_file(), &images_file())).contains("expected [00, 00, 08, 03]"));
        let none = ([0, 0, 8, 3, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 28], [0, 0, 8, 1, 0, 0, 0, 0]);
        assert!(error(parse(&none.0, &none.1)).contains("no images"));
    }

    #[test]
    fn a_label_above_nine_is_refused() {
        let mut labels = labels_file();
        labels[9] = 10;
        assert!(error(parse(&images_file(), &labels)).contains("label 1 is 10"));
    }

    #[test]
    fn other_image_sizes_and_impossible_ones_are_refused() {
        let mut images = vec![0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 1, 2, 3, 4];
        assert!(error(parse(&images, &labels_file())).contains("2x2 pixels"));
        images[4..16].fill(0xff);
        assert!(error(parse(&images, &labels_file())).contains("impossible dimensions"));
    }

    #[test]
    fn a_folder_without_the_files_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let message = error(Digits::load(folder.path(), Part::Test));
        assert!(message.contains("no t10k-images-idx3-ubyte"), "{message}");

        fs::write(folder.path().join("t10k-images-idx3-ubyte"), images_file()).unwrap();
        let message = error(Digits::load(folder.path(), Part::Test));
        assert!(message.contains("no t10k-labels-idx1-ubyte"), "{message}");

        fs::write(folder.path().join("t10k-labels-idx1-ubyte.gz"), gzipped(&labels_file())).unwrap();
        assert_eq!(Digits::load(folder.path(), Part::Test).unwrap().len(), NUM_DIGITS);
    }

    #[test]
    fn the_shipped_digits_hold_each_digit_in_proportion() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/mnist/data");
        let count = |digits: &Digits, label| digits.0.iter().filter(|digit| digit.label == label).count();
        let (train, test) = (Digits::load(&folder, Part::Train).unwrap(), Digits::load(&folder, Part::Test).unwrap());
        assert_eq!((train.len(), test.len()), (8_000, 2_000));
        for label in 0..10 {
            assert!(count(&train, label).abs_diff(4 * count(&test, label)) <= 4, "digit {label}");
        }
    }

    #[test]
    fn a_batch_has_one_row_per_digit_on_the_given_device() {
        let digits = parse(&images_file(), &labels_file()).unwrap();
        let device = Default::default();
        let batch: DigitBatch<Flex> = DigitBatcher.batch(digits.0.to_vec(), &device);
        assert_eq!(batch.images.dims(), [NUM_DIGITS, 1, SIDE, SIDE]);
        assert_eq!(batch.labels.into_data().iter::<i64>().collect::<Vec<_>>(), [7, 0, 9]);
        let first: f32 = batch.images.into_data().iter().next().unwrap();
        assert!((first - -0.131 / 0.308).abs() < 1e-6, "pixel 0 is the background");
        Flex::sync(&device).unwrap();
    }
}
