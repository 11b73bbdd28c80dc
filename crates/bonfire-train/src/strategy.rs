//! Data-parallel training as a learning strategy of `burn-train`.

mod batches;
mod epoch;
mod quiet;
mod settings;

use std::{sync::Arc, thread};

use bonfire_collectives::{BufferMut, Communicator, ProcessGroup};
use burn::{
    data::dataloader::{DataLoader, Progress},
    module::{AutodiffModule, Module},
    tensor::{
        Device,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        EventProcessorTraining, InferenceStep, Learner, LearnerEvent, LearningComponentsTypes, LearningResult,
        SupervisedLearningStrategy, SupervisedTraining, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
        TrainingComponents, TrainingStrategy, ValidLoader,
    },
};

use self::{
    batches::Loader,
    epoch::{Epoch, Trained},
    quiet::Quiet,
    settings::Plan,
};
use crate::{
    AnyHooks, BufferSync, DataParallelConfig, DistributedDataLoader, GatherOutput, HookBackend, LoaderHandle, Overlap,
    PlainShare, RankBalance, RankSeed, SamplerState, SyncGroup, TrainError, TrainingStep, batch_aligned_slice,
    synchronise_buffers,
};

/// A learning strategy in which each rank trains a copy of the model on its share of each batch.
///
/// Given to [`SupervisedTraining`] on every rank, with the same model, data and settings; ranks then stay bitwise equal.
/// Metrics, progress, early stopping and checkpoints are of all ranks together, on rank 0.
///
/// ```no_run
/// # use bonfire_train::{DataParallel, DataParallelConfig, DataParallelTraining, GatherOutput, TrainError};
/// # use burn::train::{InferenceStep, LearningComponentsTypes, SupervisedTraining, TrainStep};
/// # use burn::tensor::backend::AutodiffBackend;
/// # fn example<LC: LearningComponentsTypes + 'static>(
/// #     training: SupervisedTraining<LC>) -> Result<(), TrainError>
/// # where
/// #     <LC::TrainingModel as TrainStep>::Output: GatherOutput<LC::Backend>,
/// #     <LC::InferenceModel as InferenceStep>::Output:
/// #         GatherOutput<<LC::Backend as AutodiffBackend>::InnerBackend>,
/// # {
/// let ranks = DataParallel::from_env(DataParallelConfig::default())?;
/// let training = training.data_parallel(ranks);
/// # Ok(())
/// # }
/// ```
///
/// With loaders of Burn's own, each rank has a contiguous part of the items, and batches of the loader's size: the global
/// batch grows with the number of ranks. With a [`DistributedDataLoader`] whose handle the strategy has
/// ([`with_train_loader`](Self::with_train_loader)) it does not, and ranks see what one device would see.
///
/// The learning rate's scheduler makes one step for each optimizer step. Where running statistics differ between ranks,
/// they are made equal at the end of each epoch, before validation. `grads_accumulation` of `burn-train` is taken as
/// [`accumulation_steps`](DataParallelConfig::accumulation_steps), of which the gradient is the mean, not the sum.
///
/// Several ranks draw different random numbers, for dropout say, by [`RankSeed`].
///
/// To go on from a checkpoint, every rank reads the files of the same epoch, so all must see the directory.
///
/// # Panics
///
/// Where `burn-train` would: there is no other way for a strategy to fail. The message is that of a [`TrainError`], and
/// the group is broken, so that all other ranks fail too and say why.
#[derive(Clone)]
pub struct DataParallel {
    communicator: Arc<dyn Communicator>,
    config: DataParallelConfig,
    hooks: Option<AnyHooks>,
    train_handle: Option<LoaderHandle>,
    valid_handle: Option<LoaderHandle>,
    sync_group: Option<SyncGroup>,
    /// Kept until the training is over: rank 0's has the store.
    process_group: Option<Arc<ProcessGroup>>,
}

impl DataParallel {
    /// A strategy for the ranks of `communicator`, with the same configuration on all of them.
    #[must_use]
    pub fn new(communicator: Arc<dyn Communicator>, config: DataParallelConfig) -> Self {
        Self {
            communicator,
            config,
            hooks: None,
            train_handle: None,
            valid_handle: None,
            sync_group: None,
            process_group: None,
        }
    }

    /// A strategy for the run that this process was launched in by mpirun, srun or torchrun; launched alone, for one rank.
    ///
    /// What [`config.group`](DataParallelConfig::group) says counts before the environment. Comes back when all ranks
    /// have found each other.
    ///
    /// # Errors
    ///
    /// [`TrainError::ProcessGroup`] if this process does not become a rank: see [`ProcessGroup::new`].
    pub fn from_env(config: DataParallelConfig) -> Result<Self, TrainError> {
        Ok(Self::with_group(Arc::new(ProcessGroup::new(&config.group)?), config))
    }

    /// A strategy for the ranks of `group`, with the same configuration on all of them.
    #[must_use]
    pub fn with_group(group: Arc<ProcessGroup>, config: DataParallelConfig) -> Self {
        Self { process_group: Some(group.clone()), ..Self::new(group.communicator(), config) }
    }

    /// Reduces gradients while backward runs, on backends of accelerators: see [`Overlap`].
    #[must_use]
    pub fn with_overlap<B: HookBackend>(mut self) -> Self {
        self.hooks = Some(AnyHooks::of::<B>());
        self
    }

    /// Trains by the plan of a loader that knows about ranks, which must be the one that the training was given.
    #[must_use]
    pub fn with_train_loader<B: Backend, I, O>(mut self, loader: &DistributedDataLoader<B, I, O>) -> Self {
        self.train_handle = Some(loader.handle());
        self
    }

    /// Validates by the plan of a loader that knows about ranks, which must be the one that the training was given.
    #[must_use]
    pub fn with_valid_loader<B: Backend, I, O>(mut self, loader: &DistributedDataLoader<B, I, O>) -> Self {
        self.valid_handle = Some(loader.handle());
        self
    }

    /// Lets ranks without items in a micro step stand in for those with some in [`SyncBatchNorm`](crate::SyncBatchNorm)
    /// layers, which would wait for them, and weighs each rank's loss in these as its gradient.
    ///
    /// The loader must be one that knows about ranks.
    #[must_use]
    pub fn with_sync_group(mut self, group: &SyncGroup) -> Self {
        self.sync_group = Some(group.clone());
        self
    }

    /// The run that this process was launched in, where the strategy was made for it.
    #[must_use]
    pub fn process_group(&self) -> Option<&Arc<ProcessGroup>> {
        self.process_group.as_ref()
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// The number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// Lets the other ranks know why they should not wait for this one, neither for gradients nor in layers.
    fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
        if let Some(group) = &self.sync_group {
            group.communicator().abort(reason);
        }
    }

    fn train_loader<B: Backend, O: 'static>(
        &self,
        loader: Arc<dyn DataLoader<B, O>>,
        accumulation_steps: usize,
    ) -> Result<Loader<B, O>, TrainError> {
        if let Some(handle) = &self.train_handle {
            return Ok(Loader::Planned { loader, handle: handle.clone() });
        }
        let beyond_it = [
            (self.config.balance == RankBalance::Auto, "shares by measured speed"),
            (self.sync_group.is_some(), "batch norm over the batches of all ranks"),
        ];
        if let Some((_, asked)) = beyond_it.into_iter().find(|&(is_asked, _)| is_asked) {
            return Err(TrainError::PlainLoader { asked: asked.into() });
        }
        let num_items = loader.num_items();
        let share = PlainShare::new(&loader, self.rank(), self.world_size())?;
        Ok(Loader::Plain { share, num_items, accumulation_steps })
    }

    fn valid_loader<B: Backend, O: 'static>(
        &self,
        loader: Arc<dyn DataLoader<B, O>>,
    ) -> Result<Loader<B, O>, TrainError> {
        if let Some(handle) = &self.valid_handle {
            return Ok(Loader::Planned { loader, handle: handle.clone() });
        }
        let num_items = loader.num_items();
        let mut batch_size = [1_u64];
        if self.world_size() > 1 {
            if self.rank() == 0 {
                let mut batches = loader.iter();
                if batches.next().is_some() {
                    batch_size = [(batches.progress().items_processed as u64).max(1)];
                }
            }
            self.communicator.broadcast(BufferMut::from_slice(&mut batch_size), 0)?;
        }
        let own = batch_aligned_slice(&loader, batch_size[0] as usize, self.rank(), self.world_size())?;
        Ok(Loader::Plain { share: PlainShare::new(&own, 0, 1)?, num_items, accumulation_steps: 1 })
    }

    /// The loop over epochs.
    fn run<LC>(
        &self,
        components: &mut TrainingComponents<LC>,
        learner: &mut Learner<LC>,
        loaders: (TrainLoader<LC>, ValidLoader<LC>),
        starting_epoch: usize,
    ) -> Result<(), TrainError>
    where
        LC: LearningComponentsTypes,
        <LC::TrainingModel as TrainStep>::Output: GatherOutput<LC::Backend>,
        <LC::InferenceModel as InferenceStep>::Output: GatherOutput<<LC::Backend as AutodiffBackend>::InnerBackend>,
    {
        let communicator = &*self.communicator;
        let device = device_of(learner);
        let accumulation_steps = self.accumulation_steps(components.grad_accumulation)?;
        self.check(&Plan {
            starting_epoch,
            num_epochs: components.num_epochs,
            accumulation_steps,
            num_items: [loaders.0.num_items(), loaders.1.num_items()],
        })?;
        let train = self.train_loader(loaders.0, accumulation_steps)?;
        let valid = self.valid_loader(loaders.1)?;
        if let Some(handle) = &self.train_handle {
            start_at(handle, starting_epoch - 1)?;
        }

        let mut step =
            TrainingStep::<LC::Backend>::new(self.communicator.clone(), &learner.model(), self.config.sync.clone())?;
        let model = step.synchronise(learner.model())?;
        learner.load_model(model.into_record());
        let mut overlap = self.hooks.as_ref().map_or_else(Overlap::off, Overlap::with);

        // A single rank draws what it would without ranks.
        let is_alone = self.world_size() == 1;
        let seed = (!is_alone).then(|| RankSeed::agree::<LC::Backend>(communicator, &device)).transpose()?;
        for number in starting_epoch..=components.num_epochs {
            if let Some(seed) = &seed {
                seed.apply::<LC::Backend>(&device, number);
            }
            let mut epoch = Epoch {
                communicator,
                device: &device,
                global_progress: Progress { items_processed: number, items_total: components.num_epochs },
                interrupter: &components.interrupter,
                processor: &mut components.event_processor,
                balance: self.config.balance,
                sync_group: self.sync_group.as_ref(),
            };
            let Trained { weight, is_interrupted } = epoch.train(learner, &mut step, &mut overlap, &train)?;
            if step.averages() {
                learner.load_model(step.average(learner.model())?.into_record());
            }
            if self.config.buffers != BufferSync::Off {
                let model = synchronise_buffers(learner.model(), communicator, self.config.buffers, weight)?;
                learner.load_model(model.into_record());
            }
            if is_interrupted {
                break;
            }
            if epoch.validate(learner, &valid)? {
                break;
            }
            if let Some(handle) = &self.train_handle
                && self.config.balance == RankBalance::Auto
                && handle.agree_shares(communicator)?
            {
                tracing::info!(shares = ?handle.shares(), "ranks share batches differently from now on");
            }

            let mut stops = [0_u8];
            if self.rank() == 0 {
                let processor = &mut components.event_processor;
                // What was measured is in the store once another two events have been taken from the queue, which has
                // room for one. To the processor they mean nothing.
                processor.process_valid(LearnerEvent::Start);
                processor.process_valid(LearnerEvent::Start);
                if let Some(checkpointer) = &mut components.checkpointer {
                    checkpointer.checkpoint(learner, number, &components.event_store);
                }
                if let Some(early_stopping) = &mut components.early_stopping {
                    stops = [u8::from(early_stopping.should_stop(number, &components.event_store))];
                }
                stops[0] |= u8::from(components.interrupter.should_stop());
            }
            communicator.broadcast(BufferMut::from_slice(&mut stops), 0)?;
            if stops == [1] {
                break;
            }
        }
        Ok(())
    }
}

/// Lets the loader begin with the epoch of this index, unless it was told already where to go on.
fn start_at(handle: &LoaderHandle, epoch: usize) -> Result<(), TrainError> {
    let state = handle.state();
    if epoch > state.epoch && state.next_item == 0 {
        return handle.resume(SamplerState { epoch, ..state });
    }
    Ok(())
}

impl<LC> SupervisedLearningStrategy<LC> for DataParallel
where
    LC: LearningComponentsTypes,
    <LC::TrainingModel as TrainStep>::Output: GatherOutput<LC::Backend>,
    <LC::InferenceModel as InferenceStep>::Output: GatherOutput<<LC::Backend as AutodiffBackend>::InnerBackend>,
{
    fn train(
        &self,
        mut learner: Learner<LC>,
        dataloader_train: TrainLoader<LC>,
        dataloader_valid: ValidLoader<LC>,
        components: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        let _guard = AbortOnPanic(self);
        // Reading a checkpoint moves the model to the default device.
        let on_device = OnDevice { ranks: self, device: device_of(&learner) };
        if self.rank() == 0 {
            return on_device.train(learner, dataloader_train, dataloader_valid, components);
        }
        // The same without a word to the metrics, whose files are rank 0's.
        let starting_epoch = components.checkpoint.map_or(1, |epoch| epoch + 1);
        if let (Some(epoch), Some(checkpointer)) = (components.checkpoint, &components.checkpointer) {
            learner = checkpointer.load_checkpoint(learner, &on_device.device, epoch);
        }
        let (model, processor) = on_device.fit(components, learner, dataloader_train, dataloader_valid, starting_epoch);
        LearningResult { model: model.valid(), renderer: processor.renderer() }
    }

    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        dataloader_train: TrainLoader<LC>,
        dataloader_valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (LC::TrainingModel, SupervisedTrainingEventProcessor<LC>) {
        let on_device = OnDevice { ranks: self, device: device_of(&learner) };
        on_device.fit(components, learner, dataloader_train, dataloader_valid, starting_epoch)
    }
}

/// Ranks with the device that this one trains on.
struct OnDevice<'a, B: Backend> {
    ranks: &'a DataParallel,
    device: B::Device,
}

impl<LC> SupervisedLearningStrategy<LC> for OnDevice<'_, LC::Backend>
where
    LC: LearningComponentsTypes,
    <LC::TrainingModel as TrainStep>::Output: GatherOutput<LC::Backend>,
    <LC::InferenceModel as InferenceStep>::Output: GatherOutput<<LC::Backend as AutodiffBackend>::InnerBackend>,
{
    fn fit(
        &self,
        mut components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        dataloader_train: TrainLoader<LC>,
        dataloader_valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (LC::TrainingModel, SupervisedTrainingEventProcessor<LC>) {
        let _guard = AbortOnPanic(self.ranks);
        let loaders = (dataloader_train.to_device(&self.device), dataloader_valid.to_device(&self.device));
        // Clones of a model share leaves; ranks that are threads must not.
        learner.fork(&self.device);
        if let Err(error) = self.ranks.run(&mut components, &mut learner, loaders, starting_epoch) {
            // Does nothing if all ranks know already.
            self.ranks.abort(&error.to_string());
            panic!("{error}");
        }
        (learner.model(), components.event_processor)
    }
}

fn device_of<LC: LearningComponentsTypes>(learner: &Learner<LC>) -> Device<LC::Backend> {
    learner.model().devices().first().cloned().unwrap_or_default()
}

impl<LC> From<DataParallel> for TrainingStrategy<LC>
where
    LC: LearningComponentsTypes,
    <LC::TrainingModel as TrainStep>::Output: GatherOutput<LC::Backend>,
    <LC::InferenceModel as InferenceStep>::Output: GatherOutput<<LC::Backend as AutodiffBackend>::InnerBackend>,
{
    fn from(ranks: DataParallel) -> Self {
        Self::Custom(Arc::new(ranks))
    }
}

/// `burn-train`'s training, on ranks.
pub trait DataParallelTraining {
    /// Trains with `ranks`; all but rank 0 show nothing and write nothing: no progress, no metrics, no log.
    ///
    /// Call it after `renderer`, which it replaces on those ranks. mpirun gives a program a terminal to write to but none to
    /// read keys from, where `burn-train`'s TUI fails: give [`CliMetricsRenderer`](burn::train::renderer::CliMetricsRenderer)
    /// or one of your own if stdin is no terminal.
    #[must_use]
    fn data_parallel(self, ranks: DataParallel) -> Self;
}

impl<LC> DataParallelTraining for SupervisedTraining<LC>
where
    LC: LearningComponentsTypes,
    <LC::TrainingModel as TrainStep>::Output: GatherOutput<LC::Backend>,
    <LC::InferenceModel as InferenceStep>::Output: GatherOutput<<LC::Backend as AutodiffBackend>::InnerBackend>,
{
    fn data_parallel(self, ranks: DataParallel) -> Self {
        let is_quiet = ranks.rank() > 0;
        let training = self.with_training_strategy(ranks.into());
        if !is_quiet {
            return training;
        }
        training.renderer(Quiet).with_metric_logger(Quiet).with_application_logger(None)
    }
}

/// Lets the other ranks know that this one is gone: they would wait for it.
struct AbortOnPanic<'a>(&'a DataParallel);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.abort("its training panicked");
        }
    }
}
