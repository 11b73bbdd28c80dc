//! One epoch of a rank, and what rank 0 shows of it.

use std::time::Instant;

use bonfire_collectives::Communicator;
use burn::{
    data::dataloader::Progress,
    module::{AutodiffModule, Module},
    tensor::{
        Device,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearningComponentsTypes,
        SupervisedTrainingEventProcessor, TrainOutput, TrainStep, TrainingItem,
    },
};

use super::batches::{Batches, Loader, MicroBatch};
use crate::{
    GatherOutput, Overlap, RankBalance, SyncGroup, TrainError, TrainingStep,
    gather::{Agreed, Message, Report, Share, agree, by_micro_step, collect, merge},
};

/// What an epoch needs to know of its run.
pub(super) struct Epoch<'a, LC: LearningComponentsTypes> {
    pub(super) communicator: &'a dyn Communicator,
    pub(super) device: &'a Device<LC::Backend>,
    pub(super) global_progress: Progress,
    pub(super) interrupter: &'a Interrupter,
    pub(super) processor: &'a mut SupervisedTrainingEventProcessor<LC>,
    pub(super) balance: RankBalance,
    pub(super) sync_group: Option<&'a SyncGroup>,
}

type Inner<LC> = <<LC as LearningComponentsTypes>::Backend as AutodiffBackend>::InnerBackend;

impl<LC> Epoch<'_, LC>
where
    LC: LearningComponentsTypes,
    <LC::TrainingModel as TrainStep>::Output: GatherOutput<LC::Backend>,
    <LC::InferenceModel as InferenceStep>::Output: GatherOutput<Inner<LC>>,
{
    /// Trains through an epoch.
    pub(super) fn train(
        &mut self,
        learner: &mut Learner<LC>,
        step: &mut TrainingStep<LC::Backend>,
        overlap: &mut Overlap<LC::Backend>,
        loader: &Loader<LC::Backend, <LC::TrainingModel as TrainStep>::Input>,
    ) -> Result<Trained, TrainError> {
        let mut batches = loader.start_epoch()?;
        let mut shown = Shown::default();
        let mut trained = Trained { weight: 0.0, is_interrupted: false };
        while batches.open_window() {
            let mut outputs = Outputs(Vec::new());
            while let Some(micro_batch) = batches.next_micro_step()? {
                let Some(MicroBatch { batch, weight, num_items, num_padded, is_last, all_have_batches }) = micro_batch
                else {
                    self.sync_group.map_or(Ok(()), SyncGroup::stand_in)?;
                    outputs.0.push(None);
                    continue;
                };
                trained.weight += weight;
                if let Some(group) = self.sync_group {
                    group.weigh_loss(step.loss_weight(weight));
                }
                let model = learner.model();
                let started = Instant::now();
                let item = if is_last {
                    overlap.micro_step(step, &model, weight, |model| {
                        let TrainOutput { grads, item } = model.step(batch);
                        (grads, item)
                    })?
                } else {
                    let TrainOutput { grads, item } = model.step(batch);
                    step.micro_step(grads, weight)?;
                    item
                };
                if let Some(group) = self.sync_group
                    && !all_have_batches
                {
                    group.end_pass()?;
                }
                self.report_speed(loader, num_items + num_padded, started)?;
                outputs.0.push(Some(Output { item, weight, num_items, num_padded }));
            }
            let window = step.finish()?;

            let num_items = outputs.num_items();
            let message = outputs.take_message::<LC::Backend>(self.communicator)?;
            let agreed = self.agree(num_items, &batches, message.as_ref())?;
            // Else no rank had an item: the loader ended before.
            if agreed.num_items > 0 {
                // With local SGD a rank without items has no gradient, but the others' schedule.
                if window.is_some() || step.averages() {
                    learner.lr_step();
                }
                if let Some(window) = window {
                    learner.optimizer_step(window.gradients);
                }
                self.settle(learner, step)?;
            }

            let shares = outputs.shares(self.communicator, &agreed, message)?;
            let items = shares.joined::<LC::Backend>(self.device)?;
            for (item, num_items) in items {
                let (progress, iteration) = shown.next(&batches, num_items);
                let lr = Some(learner.lr_current());
                let item = TrainingItem::new(item, progress, self.global_progress.clone(), Some(iteration), lr);
                self.processor.process_train(LearnerEvent::ProcessedItem(item));
            }
            trained.is_interrupted = self.is_interrupted(&agreed);
            if trained.is_interrupted || agreed.is_last {
                break;
            }
        }
        if self.communicator.rank() == 0 {
            self.processor.process_train(LearnerEvent::EndEpoch(self.global_progress.items_processed));
        }
        Ok(trained)
    }

    /// Runs this rank's part of the validation; gives whether the ranks agreed to stop in it.
    pub(super) fn validate(
        &mut self,
        learner: &Learner<LC>,
        loader: &Loader<Inner<LC>, <LC::InferenceModel as InferenceStep>::Input>,
    ) -> Result<bool, TrainError> {
        let model = learner.model().valid();
        let mut batches = loader.start_epoch()?;
        let mut shown = Shown::default();
        let mut is_interrupted = false;
        while batches.open_window() {
            let mut outputs = Outputs(Vec::new());
            while let Some(micro_batch) = batches.next_micro_step()? {
                outputs.0.push(micro_batch.map(|MicroBatch { batch, weight, num_items, num_padded, .. }| Output {
                    item: model.step(batch),
                    weight,
                    num_items,
                    num_padded,
                }));
            }
            let num_items = outputs.num_items();
            let message = outputs.take_message::<Inner<LC>>(self.communicator)?;
            let agreed = self.agree(num_items, &batches, message.as_ref())?;
            let shares = outputs.shares(self.communicator, &agreed, message)?;
            let items = match loader {
                // Each rank's batch is one that one device would have seen.
                Loader::Plain { .. } => shares.apart::<Inner<LC>>(self.device)?,
                Loader::Planned { .. } => shares.joined::<Inner<LC>>(self.device)?,
            };
            for (item, num_items) in items {
                let (progress, iteration) = shown.next(&batches, num_items);
                let item = TrainingItem::new(item, progress, self.global_progress.clone(), Some(iteration), None);
                self.processor.process_valid(LearnerEvent::ProcessedItem(item));
            }
            is_interrupted = self.is_interrupted(&agreed);
            if is_interrupted || agreed.is_last {
                break;
            }
        }
        if self.communicator.rank() == 0 {
            self.processor.process_valid(LearnerEvent::EndEpoch(self.global_progress.items_processed));
        }
        Ok(is_interrupted)
    }

    /// Tells the loader how long this rank worked on a micro step, where shares go by it.
    fn report_speed<O: 'static>(
        &self,
        loader: &Loader<LC::Backend, O>,
        num_items: usize,
        started: Instant,
    ) -> Result<(), TrainError> {
        if let Some(handle) = loader.handle()
            && self.balance == RankBalance::Auto
        {
            LC::Backend::sync(self.device)
                .map_err(|error| TrainError::Setting { problem: format!("the device failed: {error:?}") })?;
            handle.report_speed(num_items, started.elapsed().as_secs_f64());
        }
        Ok(())
    }

    fn settle(&self, learner: &mut Learner<LC>, step: &mut TrainingStep<LC::Backend>) -> Result<(), TrainError> {
        let averages = step.averages();
        let model = step.settle(learner.model())?;
        if averages {
            learner.load_model(model.into_record());
        }
        Ok(())
    }

    fn agree<O>(
        &self,
        num_items: usize,
        batches: &Batches<'_, O>,
        message: Option<&Message>,
    ) -> Result<Agreed, TrainError> {
        let report = Report { num_items, is_last: batches.is_over(), stops: self.interrupter.should_stop() };
        agree(self.communicator, report, message)
    }

    /// Whether all ranks stop after this window, since one of them was asked to before it was agreed on.
    ///
    /// The interrupter alone says nothing about other ranks: whoever was asked to since then tells them of it with the
    /// next window.
    fn is_interrupted(&self, agreed: &Agreed) -> bool {
        if !agreed.stopping.is_empty() && !self.interrupter.should_stop() {
            self.interrupter.stop(Some(&format!("ranks {:?} were interrupted", agreed.stopping)));
        }
        !agreed.stopping.is_empty()
    }
}

/// An epoch of training, on one rank.
pub(super) struct Trained {
    /// The sum of this rank's weights.
    pub(super) weight: f64,
    /// The ranks agreed to stop.
    pub(super) is_interrupted: bool,
}

/// What rank 0 has shown of an epoch.
#[derive(Default)]
struct Shown {
    num_items: usize,
    iteration: usize,
}

impl Shown {
    /// How far the epoch is with another `num_items` items, and the number of micro steps so far.
    fn next<O>(&mut self, batches: &Batches<'_, O>, num_items: usize) -> (Progress, usize) {
        self.num_items += num_items;
        self.iteration += 1;
        let (num_before, items_total) = batches.epoch_items();
        (Progress { items_processed: num_before + self.num_items, items_total }, self.iteration)
    }
}

/// What this rank's micro steps of a window gave; none where it had no item.
struct Outputs<T>(Vec<Option<Output<T>>>);

struct Output<T> {
    item: T,
    weight: f64,
    num_items: usize,
    num_padded: usize,
}

impl<T> Outputs<T> {
    /// Without padding.
    fn num_items(&self) -> usize {
        self.0.iter().flatten().map(|output| output.num_items).sum()
    }

    /// What rank 0 is sent of it: nothing where it is alone, and can show the outputs as they are.
    fn take_message<B: Backend>(&mut self, communicator: &dyn Communicator) -> Result<Option<Message>, TrainError>
    where
        T: GatherOutput<B>,
    {
        if communicator.world_size() == 1 && self.0.iter().flatten().all(|output| output.num_padded == 0) {
            return Ok(None);
        }
        let share = |Output { item, weight, num_items, num_padded }| Share {
            weight,
            num_items: num_items + num_padded,
            num_padded,
            parts: T::into_parts(item),
        };
        let shares: Vec<Option<Share>> = self.0.drain(..).map(|output| output.map(share)).collect();
        Message::new(&shares).map(Some)
    }

    /// What there is of the window on this rank: on rank 0 the outputs of all ranks, elsewhere nothing.
    fn shares(
        self,
        communicator: &dyn Communicator,
        agreed: &Agreed,
        message: Option<Message>,
    ) -> Result<Shares<T>, TrainError> {
        Ok(match message {
            None => Shares::Own(self.0.into_iter().flatten().collect()),
            Some(message) => Shares::All(by_micro_step(collect(communicator, agreed, &message)?)),
        })
    }
}

/// Outputs of a window on rank 0.
enum Shares<T> {
    /// Of the only rank.
    Own(Vec<Output<T>>),
    /// Of all ranks, by micro step.
    All(Vec<Vec<(usize, Share)>>),
}

impl<T> Shares<T> {
    /// An output for each micro step, with its number of items: the ranks' together.
    fn joined<B: Backend>(self, device: &B::Device) -> Result<Vec<(T, usize)>, TrainError>
    where
        T: GatherOutput<B>,
    {
        match self {
            Self::Own(outputs) => Ok(outputs.into_iter().map(|output| (output.item, output.num_items)).collect()),
            Self::All(steps) => {
                let steps = steps.into_iter().filter(|shares| !shares.is_empty());
                steps.map(|shares| joined::<B, T>(&shares, device)).collect()
            }
        }
    }

    /// An output for each micro step of each rank.
    fn apart<B: Backend>(self, device: &B::Device) -> Result<Vec<(T, usize)>, TrainError>
    where
        T: GatherOutput<B>,
    {
        let Self::All(steps) = self else { return self.joined(device) };
        steps.into_iter().flatten().map(|share| joined::<B, T>(&[share], device)).collect()
    }
}

fn joined<B: Backend, T: GatherOutput<B>>(
    shares: &[(usize, Share)],
    device: &B::Device,
) -> Result<(T, usize), TrainError> {
    let num_items = shares.iter().map(|(_, share)| share.num_items - share.num_padded).sum();
    Ok((T::from_parts(merge(shares)?, device), num_items))
}
