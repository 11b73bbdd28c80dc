//! Trains the CNN of `examples/mnist` on ranks, each with a share of every batch: processes that mpirun, srun or torchrun
//! has started, or threads.
//!
//! ```text
//! flags -> ProcessGroup -> DistributedDataLoader -> burn-train's Learner with DataParallel -> accuracy -> one line of JSON
//! ```

#[path = "../mnist/data.rs"]
mod data;
mod model;
#[path = "../mnist/progress.rs"]
mod progress;

use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use bonfire::collectives::{ProcessGroup, run_groups};
use bonfire::train::{
    DataParallel, DataParallelConfig, DataParallelTraining, DistributedDataLoader, DistributedDataLoaderBuilder,
    HookBackend, SyncGroup,
};
use bonfire::{Replica, ReplicaDevice, Shares};
use burn::backend::Autodiff;
use burn::data::dataloader::DataLoader;
use burn::data::dataset::Dataset;
use burn::data::dataset::transform::PartialDataset;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::ElementConversion;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, SupervisedTraining};
use burn_flex::{Flex, FlexDevice};
use clap::Parser;
use serde::Serialize;

use crate::data::{Digit, DigitBatch, DigitBatcher, Digits, Part};
use crate::model::Cnn;
use crate::progress::{EpochLoss, ProgressLine};

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(report)) => match writeln!(std::io::stdout(), "{report}") {
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

/// The report in JSON, where rank 0 is of this process.
fn run(flags: &Flags) -> Result<Option<String>> {
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
    Ok(report.map(|report| serde_json::to_string(&report)).transpose()?)
}

/// Train a small CNN on handwritten digits, on ranks. The last line on stdout is a report in JSON.
#[derive(Debug, Parser)]
#[command(name = "mnist_ddp")]
struct Flags {
    /// Ranks that share each batch, each a thread of this process [default: the processes that mpirun, srun or torchrun
    /// has started; alone, 1]
    #[arg(long, value_name = "N")]
    ranks: Option<NonZeroUsize>,
    /// Each rank's share of a batch, as 2,3,3 [default: equal]
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    shares: Option<Vec<u32>>,
    /// Makes a replica of so many members of each rank [default: the bare Flex backend]
    #[arg(long, value_name = "N")]
    members: Option<NonZeroUsize>,
    /// Normalises each rank's share of a batch by itself, as Burn's BatchNorm does: faster, but ranks then learn something
    /// else than one does
    #[arg(long)]
    local_batch_norm: bool,
    /// Takes only so many of the training images [default: all]
    #[arg(long, value_name = "N")]
    train_images: Option<NonZeroUsize>,
    /// Passes over the training images
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
    /// Probability of dropout; with 0, ranks learn what one learns, up to rounding (see --local-batch-norm)
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
    fn shares(&self, world_size: usize) -> Result<Shares> {
        let Some(shares) = &self.shares else { return Ok(Shares::Equal) };
        ensure!(
            shares.len() == world_size,
            "--shares lists {} ranks, but there are {world_size}: give as many shares as ranks",
            shares.len(),
        );
        Ok(Shares::Weighted(shares.clone()))
    }

    /// A rank's loader of digits, of which all ranks see the same.
    fn loader<B: Backend>(
        &self,
        digits: Digits,
        device: &B::Device,
        (rank, world_size): (usize, usize),
    ) -> Result<DistributedDataLoader<B, Digit, DigitBatch<B>>> {
        let loader = DistributedDataLoaderBuilder::new(DigitBatcher)
            .batch_size(self.batch_size.get().min(digits.len()))
            .shares(self.shares(world_size)?)
            .rank(rank, world_size)
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

/// Trains on any backend; the report is rank 0's.
fn train<B: HookBackend>(flags: &Flags, device: &B::Device, members: usize) -> Result<Option<Report>> {
    let digits = (Digits::load(&flags.data, Part::Train)?, Digits::load(&flags.data, Part::Test)?);
    let config = match &flags.config {
        Some(path) => DataParallelConfig::from_file(path)?,
        None => DataParallelConfig::default(),
    };
    ensure!(
        config.accumulation_steps == NonZeroUsize::MIN,
        "accumulation_steps is for loaders of Burn's own: leave it out of the file, and give --accumulation-steps",
    );
    let temporary = tempfile::tempdir().context("cannot make a temporary folder; name one with --out")?;
    let folder = flags.out.as_deref().unwrap_or(temporary.path());
    prepare(folder).with_context(|| format!("cannot write to {}", folder.display()))?;

    // The same on all ranks. Made once, since threads that draw at once would each get what the others leave.
    B::seed(device, flags.seed);
    let model = Cnn::<B>::new(flags.dropout, device).fork(device);
    let train = |group: ProcessGroup| {
        let rank = Rank { flags, digits: digits.clone(), device, folder };
        rank.train(model.clone(), Arc::new(group), &config, members)
    };
    let Some(num_ranks) = flags.ranks else { return train(ProcessGroup::new(&config.group)?) };
    let launched = config.group.launch.resolve()?.world_size();
    ensure!(
        launched.get() == 1,
        "--ranks makes threads, but {launched} processes were started: leave it out, or start one"
    );
    // Whether the shares fit is known before any rank starts.
    flags.shares(num_ranks.get())?;
    let reports = run_groups(num_ranks, config.group.timeout, train);
    Ok(reports.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().next())
}

/// What a rank trains with.
struct Rank<'a, B: Backend> {
    flags: &'a Flags,
    digits: (Digits, Digits),
    device: &'a B::Device,
    folder: &'a Path,
}

impl<B: HookBackend> Rank<'_, B> {
    /// Trains this rank's copy of the model; rank 0 reports.
    fn train(
        self,
        mut model: Cnn<B>,
        group: Arc<ProcessGroup>,
        config: &DataParallelConfig,
        members: usize,
    ) -> Result<Option<Report>> {
        let Self { flags, digits: (train, test), device, folder } = self;
        let (rank, world_size) = (group.rank(), group.world_size());
        let num_images = flags.train_images.map_or(train.len(), |images| images.get().min(train.len()));
        let train = DistributedDataLoaderBuilder::new(DigitBatcher)
            .batch_size(flags.batch_size.get().min(num_images))
            .accumulation_steps(flags.accumulation_steps.get())
            .shuffle(flags.seed)
            .shares(flags.shares(world_size)?)
            .rank(rank, world_size)
            .device(device.clone())
            .build(PartialDataset::new(train, 0, num_images))?;
        let valid = flags.loader::<B::InnerBackend>(test.clone(), device, (rank, world_size))?;
        let mut ranks =
            DataParallel::with_group(group.clone(), config.clone()).with_train_loader(&train).with_valid_loader(&valid);
        if !flags.local_batch_norm {
            let layers = SyncGroup::new::<B>(group.new_communicator("batch_norm")?);
            model = model.synchronised(&layers);
            ranks = ranks.with_sync_group(&layers);
        }

        let loss = EpochLoss::default();
        let mut training = SupervisedTraining::new(folder, Arc::new(train), Arc::new(valid))
            .metrics((AccuracyMetric::new(), LossMetric::new()))
            .metric_train(loss.clone())
            .num_epochs(flags.epochs.get());
        // mpirun gives programs a terminal to write to, but none to read keys from.
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
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
