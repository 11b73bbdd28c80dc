//! A loader of this rank's batches, in the order of the sampler.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use bonfire_placement::Shares;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::Dataset;
use burn::data::dataset::transform::PartialDataset;
use burn::tensor::backend::Backend;
use crossbeam_channel::{Receiver, bounded};

use super::handle::LoaderHandle;
use super::sampler::{Sampler, SamplerEpoch, SamplerOptions, Tail};
use crate::TrainError;

/// How many batches each worker thread has ready at most, beside the one that it builds.
const PREFETCH: usize = 2;

type Counts<I> = Arc<dyn Fn(&I) -> f64 + Send + Sync>;

/// Builds a [`DistributedDataLoader`]; without any setting it is Burn's loader of one device.
pub struct DistributedDataLoaderBuilder<B: Backend, I, O> {
    batcher: Arc<dyn Batcher<B, I, O>>,
    options: SamplerOptions,
    num_workers: usize,
    device: B::Device,
    counts: Option<Counts<I>>,
}

impl<B, I, O> DistributedDataLoaderBuilder<B, I, O>
where
    B: Backend,
    I: Clone + Send + Sync + 'static,
    O: Send + 'static,
{
    /// Batches of one item for one rank, in the dataset's order, built by the thread that iterates.
    pub fn new(batcher: impl Batcher<B, I, O> + 'static) -> Self {
        let options = SamplerOptions {
            num_items: 0,
            batch_size: 1,
            accumulation_steps: 1,
            seed: 0,
            shuffle: false,
            tail: Tail::Keep,
            shares: Shares::Equal,
            rank: 0,
            world_size: 1,
        };
        Self { batcher: Arc::new(batcher), options, num_workers: 0, device: B::Device::default(), counts: None }
    }

    /// Items of one micro step over all ranks together, whatever their number: what one device would see at once.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.options.batch_size = batch_size;
        self
    }

    /// Micro steps of one optimizer step, 1 by default.
    pub fn accumulation_steps(mut self, accumulation_steps: usize) -> Self {
        self.options.accumulation_steps = accumulation_steps;
        self
    }

    /// Gives each epoch an order of its own, from `seed`, which must be the same on every rank.
    pub fn shuffle(mut self, seed: u64) -> Self {
        (self.options.shuffle, self.options.seed) = (true, seed);
        self
    }

    /// Threads that build batches ahead of time, 0 by default; their number changes no batch and no order.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.num_workers = num_workers;
        self
    }

    /// How a micro batch is shared out among the ranks, equally by default.
    pub fn shares(mut self, shares: Shares) -> Self {
        self.options.shares = shares;
        self
    }

    /// What happens to an incomplete micro batch at the end; it is kept by default.
    pub fn tail(mut self, tail: Tail) -> Self {
        self.options.tail = tail;
        self
    }

    /// Which rank this is, of how many.
    pub fn rank(mut self, rank: usize, world_size: usize) -> Self {
        (self.options.rank, self.options.world_size) = (rank, world_size);
        self
    }

    /// Where batches are built.
    pub fn device(mut self, device: B::Device) -> Self {
        self.device = device;
        self
    }

    /// What an item weighs in the gradient in place of 1: its tokens, say, where the loss is a mean over tokens.
    pub fn with_counts(mut self, counts: impl Fn(&I) -> f64 + Send + Sync + 'static) -> Self {
        self.counts = Some(Arc::new(counts));
        self
    }

    /// The loader over `dataset`, which must be the same on every rank.
    ///
    /// # Errors
    ///
    /// [`TrainError::Argument`] and [`TrainError::Shares`] name the setting that cannot be.
    pub fn build(self, dataset: impl Dataset<I> + 'static) -> Result<DistributedDataLoader<B, I, O>, TrainError> {
        let sampler = Sampler::new(SamplerOptions { num_items: dataset.len(), ..self.options })?;
        Ok(DistributedDataLoader {
            source: Source {
                dataset: Arc::new(dataset),
                batcher: self.batcher,
                device: self.device,
                counts: self.counts,
            },
            num_workers: self.num_workers,
            handle: LoaderHandle::new(sampler),
        })
    }
}

/// Burn's `DataLoader` of one rank: its share of each global batch, in an order that all ranks know.
///
/// Each `iter()` starts the next epoch, with its own order and its own members of this rank's shard if shuffled. Micro
/// steps in which this rank has no item give no batch; [`handle`](Self::handle) knows where they are.
///
/// `num_items` and the iterator's progress are this rank's, with padding. `slice`, for one rank alone, gives a
/// loader over that part of the dataset with a walk of its own, `to_device` one with the same handle.
pub struct DistributedDataLoader<B: Backend, I, O> {
    source: Source<B, I, O>,
    num_workers: usize,
    handle: LoaderHandle,
}

impl<B: Backend, I, O> DistributedDataLoader<B, I, O> {
    /// The plan of its batches, for the one who trains with them.
    pub fn handle(&self) -> LoaderHandle {
        self.handle.clone()
    }
}

impl<B, I, O> DataLoader<B, O> for DistributedDataLoader<B, I, O>
where
    B: Backend,
    I: Clone + Send + Sync + 'static,
    O: Send + 'static,
{
    /// # Panics
    ///
    /// While iterating, with what the dataset, the batcher or the counts panicked with.
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let epoch = self.handle.start_epoch().unwrap_or_else(|error| panic!("{error}"));
        let num_left = epoch.num_rank_items();
        let items_total = self.num_items().max(num_left);
        let walk = Walk { source: self.source.clone(), order: epoch.order().into(), epoch };
        let steps = Box::new(walk.clone().steps_with_batch());
        let batches = match self.num_workers {
            0 => Batches::Here { walk, steps },
            num_workers => Batches::Ahead(Workers::start(&walk, steps.count(), num_workers)),
        };
        let progress = Progress { items_processed: items_total - num_left, items_total };
        Box::new(RankIterator { batches, progress, handle: self.handle.clone() })
    }

    fn num_items(&self) -> usize {
        let epoch = self.handle.sampler().epoch(0, 0).unwrap_or_else(|error| panic!("{error}"));
        epoch.num_rank_items()
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, O>> {
        let source = Source { device: device.clone(), ..self.source.clone() };
        Arc::new(Self { source, num_workers: self.num_workers, handle: self.handle.clone() })
    }

    /// # Panics
    ///
    /// If the loader is that of one of several ranks: who slices it would share out each batch a second time.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, O>> {
        let world_size = self.handle.sampler().options().world_size;
        assert!(
            world_size == 1,
            "a DistributedDataLoader of one of {world_size} ranks cannot be sliced; give it to `DataParallel`, with \
             `with_train_loader` or `with_valid_loader`, before the training"
        );
        let end = end.min(self.source.dataset.len());
        let start = start.min(end);
        let dataset = Arc::new(PartialDataset::new(self.source.dataset.clone(), start, end));
        let options = SamplerOptions { num_items: end - start, ..self.handle.sampler().options().clone() };
        let sampler = Sampler::new(options).unwrap_or_else(|error| panic!("{error}"));
        let source = Source { dataset, ..self.source.clone() };
        Arc::new(Self { source, num_workers: self.num_workers, handle: LoaderHandle::new(sampler) })
    }
}

/// Where batches come from.
struct Source<B: Backend, I, O> {
    dataset: Arc<dyn Dataset<I>>,
    batcher: Arc<dyn Batcher<B, I, O>>,
    device: B::Device,
    counts: Option<Counts<I>>,
}

impl<B: Backend, I, O> Clone for Source<B, I, O> {
    fn clone(&self) -> Self {
        Self {
            dataset: self.dataset.clone(),
            batcher: self.batcher.clone(),
            device: self.device.clone(),
            counts: self.counts.clone(),
        }
    }
}

/// An epoch of a source.
struct Walk<B: Backend, I, O> {
    source: Source<B, I, O>,
    epoch: SamplerEpoch,
    order: Arc<[usize]>,
}

impl<B: Backend, I, O> Clone for Walk<B, I, O> {
    fn clone(&self) -> Self {
        Self { source: self.source.clone(), epoch: self.epoch.clone(), order: self.order.clone() }
    }
}

struct Batch<O> {
    output: O,
    /// With padding.
    num_items: usize,
    weight: f64,
}

impl<B: Backend, I, O> Walk<B, I, O> {
    fn steps_with_batch(self) -> impl Iterator<Item = usize> {
        let Self { epoch, .. } = self;
        (0..epoch.num_micro_steps()).filter(move |&step| !epoch.positions(step).is_empty())
    }

    fn batch(&self, step: usize) -> Batch<O> {
        let get = |position| {
            let index = SamplerEpoch::dataset_index(&self.order, position);
            self.source.dataset.get(index).unwrap_or_else(|| {
                panic!("the dataset has no item {index}, though its length is {}", self.source.dataset.len())
            })
        };
        let items: Vec<I> = self.epoch.positions(step).map(get).collect();
        let num_real = self.epoch.micro_step(step).num_items;
        let weight = match &self.source.counts {
            None => num_real as f64,
            Some(counts) => items[..num_real].iter().map(|item| counts(item)).sum(),
        };
        Batch { num_items: items.len(), output: self.source.batcher.batch(items, &self.source.device), weight }
    }
}

struct RankIterator<B: Backend, I, O> {
    batches: Batches<B, I, O>,
    progress: Progress,
    handle: LoaderHandle,
}

enum Batches<B: Backend, I, O> {
    Here { walk: Walk<B, I, O>, steps: Box<dyn Iterator<Item = usize>> },
    Ahead(Workers<O>),
}

impl<B: Backend, I, O> Iterator for RankIterator<B, I, O> {
    type Item = O;

    fn next(&mut self) -> Option<O> {
        let batch = match &mut self.batches {
            Batches::Here { walk, steps } => walk.batch(steps.next()?),
            Batches::Ahead(workers) => workers.next()?,
        };
        self.progress.items_processed += batch.num_items;
        self.handle.set_last_weight(batch.weight);
        Some(batch.output)
    }
}

impl<B: Backend, I, O> DataLoaderIterator<O> for RankIterator<B, I, O> {
    fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

/// What a worker sends: a batch, or what it panicked with.
type Built<O> = Result<Batch<O>, Box<dyn Any + Send>>;

/// Threads of which the first builds the first batch, the second the second, and so on round and round.
struct Workers<O> {
    receivers: Vec<Receiver<Built<O>>>,
    threads: Vec<JoinHandle<()>>,
    next: usize,
    num_batches: usize,
}

impl<O: Send + 'static> Workers<O> {
    fn start<B: Backend, I: 'static>(walk: &Walk<B, I, O>, num_batches: usize, num_workers: usize) -> Self {
        let mut workers = Workers { receivers: Vec::new(), threads: Vec::new(), next: 0, num_batches };
        let num_workers = num_workers.min(num_batches);
        for worker in 0..num_workers {
            let (sender, receiver) = bounded::<Built<O>>(PREFETCH);
            let walk = walk.clone();
            let work = move || {
                for step in walk.clone().steps_with_batch().skip(worker).step_by(num_workers) {
                    let built = catch_unwind(AssertUnwindSafe(|| walk.batch(step)));
                    let panicked = built.is_err();
                    // Nobody receives once the iterator was dropped.
                    if sender.send(built).is_err() || panicked {
                        return;
                    }
                }
            };
            let thread = thread::Builder::new().name(format!("loader {worker}")).spawn(work);
            workers.threads.push(thread.unwrap_or_else(|error| panic!("cannot start a loader thread: {error}")));
            workers.receivers.push(receiver);
        }
        workers
    }
}

impl<O> Workers<O> {
    fn next(&mut self) -> Option<Batch<O>> {
        if self.next == self.num_batches {
            return None;
        }
        let built = self.receivers[self.next % self.receivers.len()].recv();
        self.next += 1;
        match built {
            Ok(Ok(batch)) => Some(batch),
            Ok(Err(panic)) => {
                self.next = self.num_batches;
                resume_unwind(panic)
            }
            Err(_) => panic!("a loader thread ended before its last batch"),
        }
    }
}

impl<O> Drop for Workers<O> {
    fn drop(&mut self) {
        // Lets those go that wait for room.
        self.receivers.clear();
        for thread in self.threads.drain(..) {
            // A panic was caught and handed over already.
            let _ = thread.join();
        }
    }
}
