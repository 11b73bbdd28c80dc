//! Settings that do not go with each other, or not with those of other ranks.

use std::sync::Arc;

use super::DataParallel;
use crate::{LoaderHandle, RankBalance, SamplerOptions, SamplerState, TrainError, parameters::compare_lines};

/// What a run is to do, beside what the strategy knows itself.
pub(super) struct Plan {
    pub(super) starting_epoch: usize,
    pub(super) num_epochs: usize,
    pub(super) accumulation_steps: usize,
    /// Of the training and the validation loader.
    pub(super) num_items: [usize; 2],
}

impl DataParallel {
    /// Micro steps of an optimizer step for loaders of Burn's own, of the two places where they can be set.
    pub(super) fn accumulation_steps(&self, of_learner: Option<usize>) -> Result<usize, TrainError> {
        let own = self.config.accumulation_steps.get();
        let problem = match of_learner {
            Some(0) => "grads_accumulation is 0; give at least 1".into(),
            Some(steps) if own > 1 && steps != own => {
                format!("grads_accumulation is {steps}, but accumulation_steps is {own}; set one of them")
            }
            Some(steps) if steps > 1 && self.train_handle.is_some() => {
                format!(
                    "grads_accumulation is {steps}; give a DistributedDataLoader its own accumulation_steps instead"
                )
            }
            None if own > 1 && self.train_handle.is_some() => {
                format!("accumulation_steps is {own}; give a DistributedDataLoader its own instead")
            }
            _ => return Ok(of_learner.unwrap_or(own)),
        };
        Err(TrainError::Setting { problem })
    }

    /// Checks this rank's settings, and that all ranks have the same.
    ///
    /// # Errors
    ///
    /// [`TrainError::Setting`] and [`TrainError::Argument`] for what cannot be, [`TrainError::RanksDiffer`] on every rank,
    /// [`TrainError::Collective`] if the ranks do not come together.
    pub(super) fn check(&self, plan: &Plan) -> Result<(), TrainError> {
        if self.config.balance == RankBalance::Auto && self.sync_group.is_some() {
            let problem = "ranks wait for each other in the layers of `with_sync_group`, so their speed cannot be \
                           measured; leave balance fixed, and give the loader shares";
            return Err(TrainError::Setting { problem: problem.into() });
        }
        if let Some(group) = &self.sync_group
            && core::ptr::addr_eq(Arc::as_ptr(group.communicator()), Arc::as_ptr(&self.communicator))
        {
            let problem = "the layers of `with_sync_group` have the strategy's own communicator, whose collectives they \
                           would mix up; give them one of `ProcessGroup::new_communicator`";
            return Err(TrainError::Setting { problem: problem.into() });
        }
        for (name, handle) in [("training", &self.train_handle), ("validation", &self.valid_handle)] {
            handle.as_ref().map_or(Ok(()), |handle| self.check_place(name, handle))?;
        }
        let [num_train, num_valid] = plan.num_items;
        let own = [
            ("first epoch", plan.starting_epoch.to_string()),
            ("num_epochs", plan.num_epochs.to_string()),
            ("accumulation_steps", plan.accumulation_steps.to_string()),
            ("balance", format!("{:?}", self.config.balance)),
            ("buffers", format!("{:?}", self.config.buffers)),
            ("with_sync_group", self.sync_group.is_some().to_string()),
        ];
        let mut settings: Vec<(String, String)> = own.map(|(name, value)| (name.to_owned(), value)).into();
        settings.extend(described("training", self.train_handle.as_ref(), num_train));
        settings.extend(described("validation", self.valid_handle.as_ref(), num_valid));
        let (names, values): (Vec<_>, Vec<_>) = settings.into_iter().unzip();
        compare_lines(&*self.communicator, &values, |line| names[line].clone())
    }

    fn check_place(&self, name: &str, handle: &LoaderHandle) -> Result<(), TrainError> {
        let own = (self.rank(), self.world_size());
        let SamplerOptions { rank, world_size, .. } = *handle.sampler().options();
        if (rank, world_size) == own {
            return Ok(());
        }
        let hint = format!("build the {name} loader with `.rank({}, {})`", own.0, own.1);
        Err(TrainError::Argument { argument: "rank", given: format!("{rank} of {world_size}"), hint })
    }
}

/// What is the same on all ranks if a loader gives them parts of the same batches.
fn described(name: &str, handle: Option<&LoaderHandle>, num_items: usize) -> [(String, String); 9] {
    let plan = handle.map(|handle| (handle.state(), handle.sampler().options().clone()));
    let line = |option: &str, value: fn(&SamplerState, &SamplerOptions) -> String| {
        let value = plan.as_ref().map_or_else(|| "of a loader without a plan".into(), |(state, of)| value(state, of));
        (format!("{option} of the {name} loader"), value)
    };
    // A loader with a plan counts its rank's items alone.
    let num_items = plan.as_ref().map_or(num_items, |(_, of)| of.num_items);
    [
        (format!("number of items of the {name} loader"), num_items.to_string()),
        line("batch_size", |_, of| of.batch_size.to_string()),
        line("accumulation_steps", |_, of| of.accumulation_steps.to_string()),
        line("seed", |_, of| of.seed.to_string()),
        line("shuffle", |_, of| of.shuffle.to_string()),
        line("tail", |_, of| format!("{:?}", of.tail)),
        line("shares", |_, of| format!("{:?}", of.shares)),
        line("next epoch", |state, _| state.epoch.to_string()),
        line("next item", |state, _| state.next_item.to_string()),
    ]
}
