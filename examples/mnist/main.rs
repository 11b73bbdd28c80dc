//! Trains a small CNN on handwritten digits, on several members at once or, with `--plain`, on one device.
//!
//! ```text
//! flags -> backend and device -> digits -> burn-train's Learner -> accuracy on the test digits -> one line of JSON
//! ```

mod data;
mod model;
mod progress;

use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use bonfire::{Replica, ReplicaDevice, ReplicaOptions, Shares};
use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::Dataset;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::ElementConversion;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, SupervisedTraining};
use burn_flex::{Flex, FlexDevice};
use clap::Parser;
use serde::Serialize;

use crate::data::{DigitBatch, DigitBatcher, Digits, Part};
use crate::model::Cnn;
use crate::progress::{EpochLoss, ProgressLine};

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(report) => match writeln!(std::io::stdout(), "{report}") {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&anyhow!("cannot print the report: {error}")),
        },
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    // Nobody may be listening.
    let _ = writeln!(std::io::stderr(), "error: {error:#}");
    ExitCode::FAILURE
}

fn run(flags: &Flags) -> Result<String> {
    let report = if flags.plain {
        type MyBackend = Autodiff<Flex>;
        let device = FlexDevice;

        train::<MyBackend>(flags, &device, 1)?
    } else {
        type MyBackend = Autodiff<Replica<Flex>>;
        let device = flags.replica_device()?;

        train::<MyBackend>(flags, &device, device.num_members())?
    };
    Ok(serde_json::to_string(&report)?)
}

/// Train a small CNN on handwritten digits. The last line on stdout is a report in JSON.
#[derive(Debug, Parser)]
#[command(name = "mnist")]
struct Flags {
    /// Members that share each batch [default: one per core]
    #[arg(long, value_name = "N", conflicts_with = "plain")]
    members: Option<NonZeroUsize>,
    /// Each member's share of a batch, as 2,3,3 [default: equal]
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "plain", allow_negative_numbers = true)]
    shares: Option<Vec<u32>>,
    /// Train on the bare Flex backend, for comparison
    #[arg(long)]
    plain: bool,
    /// Passes over the training digits
    #[arg(long, value_name = "E", default_value = "3")]
    epochs: NonZeroUsize,
    /// Images per training step
    #[arg(long, value_name = "N", default_value = "64")]
    batch_size: NonZeroUsize,
    /// Step size of Adam
    #[arg(long, value_name = "RATE", default_value = "0.002", value_parser = learning_rate, allow_negative_numbers = true)]
    learning_rate: f64,
    /// Seed of the initial weights, of dropout and of the order of the images
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    seed: u64,
    /// Folder of four files in MNIST's format, plain or gzipped
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/mnist/data"))]
    data: PathBuf,
    /// Folder for Burn's logs and metrics [default: a temporary one, removed at the end]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Flags {
    /// The members that `--members` and `--shares` ask for; without them, what the machine offers.
    fn replica_device(&self) -> Result<ReplicaDevice<Flex>> {
        let num_members = self.members.map(NonZeroUsize::get);
        let (num_members, shares) = match (&self.shares, num_members) {
            (None, None) => return Ok(ReplicaDevice::from_env()?),
            (None, Some(num_members)) => (num_members, Shares::Equal),
            (Some(shares), None) => (shares.len(), Shares::Weighted(shares.clone())),
            (Some(shares), Some(num_members)) => {
                ensure!(
                    shares.len() == num_members,
                    "--shares lists {} members, --members asks for {num_members}: give as many shares as members",
                    shares.len(),
                );
                (num_members, Shares::Weighted(shares.clone()))
            }
        };
        let options = ReplicaOptions { shares, ..Default::default() };
        Ok(ReplicaDevice::with_options(vec![FlexDevice; num_members], options)?)
    }
}

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        Ok(_) => Err("expected a number above zero".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// What a run did, as printed.
#[derive(Debug, Serialize)]
struct Report {
    backend: String,
    members: usize,
    /// Epochs that were trained; fewer than asked for after a stop in the TUI.
    epochs: usize,
    /// The mean over the training images of each epoch, taken while the weights change.
    train_loss: Vec<f64>,
    /// Share of the test images that the trained model labels correctly.
    test_accuracy: f64,
    /// Wall time of the training, with the pass over the test images that ends each epoch.
    seconds: f64,
    /// Training images over `seconds`.
    items_per_second: f64,
}

/// Trains on any backend: nothing from here on knows how many devices there are.
fn train<B: AutodiffBackend>(flags: &Flags, device: &B::Device, members: usize) -> Result<Report> {
    let (train, test) = (Digits::load(&flags.data, Part::Train)?, Digits::load(&flags.data, Part::Test)?);
    B::seed(device, flags.seed);

    // Batches are made on this thread: loader threads would deliver them in an order that differs from run to run.
    let batch_size = flags.batch_size.get().min(train.len());
    let train = DataLoaderBuilder::new(DigitBatcher)
        .batch_size(batch_size)
        .shuffle(flags.seed)
        .set_device(device.clone())
        .build(train);
    let test = DataLoaderBuilder::new(DigitBatcher).batch_size(batch_size).set_device(device.clone()).build(test);

    let temporary = tempfile::tempdir().context("cannot make a temporary folder; name one with --out")?;
    let folder = flags.out.as_deref().unwrap_or(temporary.path());
    prepare(folder).with_context(|| format!("cannot write to {}", folder.display()))?;

    let loss = EpochLoss::default();
    let mut training = SupervisedTraining::new(folder, train, test.clone())
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .metric_train(loss.clone())
        .num_epochs(flags.epochs.get());
    if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
        training = training.renderer(ProgressLine::new(loss.clone()));
    }
    if flags.out.is_none() {
        // Its file would be gone by the time that a message points to it.
        training = training.with_application_logger(None);
    }

    let start = Instant::now();
    let learner = Learner::new(Cnn::<B>::new(device), AdamConfig::new().init(), flags.learning_rate);
    let result = training.launch(learner);
    B::sync(device).context("the device failed")?;
    let seconds = start.elapsed().as_secs_f64();
    // Gives the terminal back, if it was Burn's.
    drop(result.renderer);

    Ok(Report {
        backend: B::InnerBackend::name(device),
        members,
        epochs: loss.means().len(),
        train_loss: loss.means(),
        test_accuracy: accuracy(&result.model, test.as_ref()),
        seconds,
        items_per_second: loss.num_items() as f64 / seconds,
    })
}

/// Makes the folder and tries it: Burn's loggers, which write to it all along, panic when they cannot.
fn prepare(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut trial = tempfile::NamedTempFile::new_in(folder)?;
    trial.write_all(&[0; 1 << 16])?;
    trial.flush()
}

/// Share of the images that the model labels correctly.
fn accuracy<B: Backend>(model: &Cnn<B>, digits: &dyn DataLoader<B, DigitBatch<B>>) -> f64 {
    let num_right = |batch: DigitBatch<B>| {
        let labels = model.forward(batch.images).argmax(1).flatten::<1>(0, 1);
        labels.equal(batch.labels).int().sum().into_scalar().elem::<i64>()
    };
    digits.iter().map(num_right).sum::<i64>() as f64 / digits.num_items() as f64
}
