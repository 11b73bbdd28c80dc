//! Trains the CNN of `examples/mnist` on ranks that are threads, each with a share of every batch.
//!
//! ```text
//! flags -> ranks -> DistributedDataLoader -> burn-train's Learner with DataParallel -> accuracy -> one line of JSON
//! ```

#[path = "../mnist/data.rs"]
mod data;
#[path = "../mnist/model.rs"]
mod model;
#[path = "../mnist/progress.rs"]
mod progress;

use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use bonfire::collectives::run_ranks;
use bonfire::train::{
    DataParallel, DataParallelConfig, DataParallelTraining, DistributedDataLoader, DistributedDataLoaderBuilder,
};
use bonfire::{Replica, ReplicaDevice, Shares};
use burn::backend::Autodiff;
use burn::data::dataloader::DataLoader;
use burn::data::dataset::Dataset;
use burn::nn::DropoutConfig;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::ElementConversion;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, SupervisedTraining};
use burn_flex::{Flex, FlexDevice};
use clap::Parser;
use serde::Serialize;

use crate::data::{Digit, DigitBatch, DigitBatcher, Digits, Part};
use crate::model::Cnn;
use crate::progress::{EpochLoss, ProgressLine};

/// How long a rank waits for others before all end with an error that names those that did not come.
const TIMEOUT: Duration = Duration::from_secs(120);

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
    let report = match flags.members {
        None => {
            type MyBackend = Autodiff<Flex>;

            train::<MyBackend>(flags, &FlexDevice, 1)?
        }
        Some(members) => {
            type MyBackend = Autodiff<Replica<Flex>>;
            let device = ReplicaDevice::new(vec![FlexDevice; members.get()])?;

            train::<MyBackend>(flags, &device, members.get())?
        }
    };
    Ok(serde_json::to_string(&report)?)
}

/// Train a small CNN on handwritten digits, on ranks. The last line on stdout is a report in JSON.
#[derive(Debug, Parser)]
#[command(name = "mnist_ddp")]
struct Flags {
    /// Ranks that share each batch, each a thread of this process
    #[arg(long, value_name = "N", default_value = "2")]
    ranks: NonZeroUsize,
    /// Each rank's share of a batch, as 2,3,3 [default: equal]
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    shares: Option<Vec<u32>>,
    /// Makes a replica of so many members of each rank [default: the bare Flex backend]
    #[arg(long, value_name = "N")]
    members: Option<NonZeroUsize>,
    /// Passes over the training digits
    #[arg(long, value_name = "E", default_value = "3")]
    epochs: NonZeroUsize,
    /// Images per micro step, of all ranks together
    #[arg(long, value_name = "N", default_value = "64")]
    batch_size: NonZeroUsize,
    /// Micro steps per step of the optimizer
    #[arg(long, value_name = "N", default_value = "1")]
    accumulation_steps: NonZeroUsize,
    /// Step size of Adam
    #[arg(long, value_name = "RATE", default_value = "0.002", value_parser = learning_rate, allow_negative_numbers = true)]
    learning_rate: f64,
    /// Probability of dropout; with 0, ranks learn what one learns, up to rounding
    #[arg(long, value_name = "P", default_value = "0.3", value_parser = probability, allow_negative_numbers = true)]
    dropout: f64,
    /// Seed of the initial weights and of the order of the images
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    seed: u64,
    /// Settings of the data-parallel training, a file in TOML or JSON
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder of four files in MNIST's format, plain or gzipped
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/mnist/data"))]
    data: PathBuf,
    /// Folder for Burn's logs and metrics [default: a temporary one, removed at the end]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Flags {
    fn shares(&self) -> Result<Shares> {
        let Some(shares) = &self.shares else { return Ok(Shares::Equal) };
        ensure!(
            shares.len() == self.ranks.get(),
            "--shares lists {} ranks, --ranks asks for {}: give as many shares as ranks",
            shares.len(),
            self.ranks,
        );
        Ok(Shares::Weighted(shares.clone()))
    }

    /// A rank's loader of digits, of which all ranks see the same.
    fn loader<B: Backend>(
        &self,
        digits: Digits,
        device: &B::Device,
        rank: usize,
    ) -> Result<DistributedDataLoader<B, Digit, DigitBatch<B>>> {
        let loader = DistributedDataLoaderBuilder::new(DigitBatcher)
            .batch_size(self.batch_size.get().min(digits.len()))
            .shares(self.shares()?)
            .rank(rank, self.ranks.get())
            .device(device.clone());
        Ok(loader.build(digits)?)
    }
}

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        Ok(_) => Err("expected a number above zero".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(probability) if (0.0..1.0).contains(&probability) => Ok(probability),
        Ok(_) => Err("expected a number from 0 to below 1".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// What a run did, as printed.
#[derive(Debug, Serialize)]
struct Report {
    backend: String,
    /// Of each rank.
    members: usize,
    world_size: usize,
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

/// Trains on any backend, on as many ranks as asked for.
fn train<B: AutodiffBackend>(flags: &Flags, device: &B::Device, members: usize) -> Result<Report> {
    let digits = (Digits::load(&flags.data, Part::Train)?, Digits::load(&flags.data, Part::Test)?);
    let config = match &flags.config {
        Some(path) => DataParallelConfig::from_file(path)?,
        None => DataParallelConfig::default(),
    };
    // Whether the shares fit is known before any rank starts.
    flags.shares()?;
    let temporary = tempfile::tempdir().context("cannot make a temporary folder; name one with --out")?;
    let folder = flags.out.as_deref().unwrap_or(temporary.path());
    prepare(folder).with_context(|| format!("cannot write to {}", folder.display()))?;

    // One model, of which each rank trains a copy: threads that draw at once would each get what the others leave.
    B::seed(device, flags.seed);
    let mut model = Cnn::<B>::new(device).fork(device);
    model.dropout = DropoutConfig::new(flags.dropout).init();
    let reports = run_ranks(flags.ranks, TIMEOUT, |communicator| {
        let rank = Rank { flags, digits: digits.clone(), device, folder };
        let ranks = DataParallel::new(Arc::new(communicator), config.clone());
        rank.train(model.clone(), ranks, members)
    });
    let reports = reports.into_iter().collect::<Result<Vec<_>>>()?;
    reports.into_iter().flatten().next().context("rank 0 gave no report")
}

/// What a rank trains with.
struct Rank<'a, B: Backend> {
    flags: &'a Flags,
    digits: (Digits, Digits),
    device: &'a B::Device,
    folder: &'a Path,
}

impl<B: AutodiffBackend> Rank<'_, B> {
    /// Trains this rank's copy of the model; rank 0 reports.
    fn train(self, model: Cnn<B>, ranks: DataParallel, members: usize) -> Result<Option<Report>> {
        let Self { flags, digits: (train, test), device, folder } = self;
        let (rank, world_size) = (ranks.rank(), ranks.world_size());
        let train = DistributedDataLoaderBuilder::new(DigitBatcher)
            .batch_size(flags.batch_size.get().min(train.len()))
            .accumulation_steps(flags.accumulation_steps.get())
            .shuffle(flags.seed)
            .shares(flags.shares()?)
            .rank(rank, world_size)
            .device(device.clone())
            .build(train)?;
        let valid = flags.loader::<B::InnerBackend>(test.clone(), device, rank)?;
        let ranks = ranks.with_train_loader(&train).with_valid_loader(&valid);

        let loss = EpochLoss::default();
        let mut training = SupervisedTraining::new(folder, Arc::new(train), Arc::new(valid))
            .metrics((AccuracyMetric::new(), LossMetric::new()))
            .metric_train(loss.clone())
            .num_epochs(flags.epochs.get());
        if !std::io::stdout().is_terminal() {
            training = training.renderer(ProgressLine::new(loss.clone()));
        }
        if flags.out.is_none() {
            // Its file would be gone by the time that a message points to it.
            training = training.with_application_logger(None);
        }

        let start = Instant::now();
        let learner = Learner::new(model, AdamConfig::new().init(), flags.learning_rate);
        let result = training.data_parallel(ranks).launch(learner);
        B::sync(device).context("the device failed")?;
        let seconds = start.elapsed().as_secs_f64();
        // Gives the terminal back, if it was Burn's.
        drop(result.renderer);
        if rank > 0 {
            return Ok(None);
        }

        let batches = DistributedDataLoaderBuilder::new(DigitBatcher)
            .batch_size(flags.batch_size.get())
            .device(device.clone())
            .build(test)?;
        Ok(Some(Report {
            backend: B::InnerBackend::name(device),
            members,
            world_size,
            epochs: loss.means().len(),
            train_loss: loss.means(),
            test_accuracy: accuracy(&result.model, &batches),
            seconds,
            items_per_second: loss.num_items() as f64 / seconds,
        }))
    }
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
