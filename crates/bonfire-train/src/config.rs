//! Settings of data-parallel training.

use std::{fmt, num::NonZeroUsize, path::Path};

use bonfire_collectives::ProcessGroupOptions;
use serde::{Deserialize, Serialize};

use crate::{BufferSync, ReduceDType, Reduction, SyncOptions, TrainError};

/// How much of a batch each rank gets from one epoch to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankBalance {
    /// The shares of the loader stay as they are.
    #[default]
    Fixed,
    /// After each epoch, ranks agree on shares with which they would have ended its steps together; the device is
    /// waited for in each step. Needs a [`DistributedDataLoader`](crate::DistributedDataLoader).
    Auto,
}

/// Settings of data-parallel training, equal on all ranks. Each has a default.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use bonfire_train::{BufferSync, DataParallelConfig};
///
/// let config = DataParallelConfig::default()
///     .with_accumulation_steps(NonZeroUsize::new(4).unwrap())
///     .with_buffers(BufferSync::Average);
/// let text = "accumulation_steps = 4\nbuffers = 'average'";
/// assert_eq!(toml::from_str::<DataParallelConfig>(text).unwrap(), config);
/// println!("{config}");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataParallelConfig {
    /// Micro steps of one optimizer step, with a loader of Burn's own: batches of each rank. 1.
    ///
    /// A [`DistributedDataLoader`](crate::DistributedDataLoader) has its own number.
    pub accumulation_steps: NonZeroUsize,
    /// How much of a batch each rank gets. Fixed shares.
    pub balance: RankBalance,
    /// What becomes of running statistics at the end of an epoch. Rank 0's are taken.
    pub buffers: BufferSync,
    /// How ranks keep their models equal.
    pub sync: SyncOptions,
    /// How processes become ranks of a group, and how long they wait for each other; only this rank's.
    pub group: ProcessGroupOptions,
}

impl Default for DataParallelConfig {
    fn default() -> Self {
        Self {
            accumulation_steps: NonZeroUsize::MIN,
            balance: RankBalance::default(),
            buffers: BufferSync::default(),
            sync: SyncOptions::default(),
            group: ProcessGroupOptions::default(),
        }
    }
}

impl DataParallelConfig {
    /// Reads a file, TOML or JSON by its extension.
    ///
    /// # Errors
    ///
    /// [`TrainError::Config`] if it cannot be read, has another extension, or says what is no setting.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, TrainError> {
        let path = path.as_ref();
        let problem = |problem: String| TrainError::Config { path: path.to_owned(), problem };
        let text = std::fs::read_to_string(path).map_err(|error| problem(error.to_string()))?;
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => toml::from_str(&text).map_err(|error| problem(error.to_string())),
            Some("json") => serde_json::from_str(&text).map_err(|error| problem(error.to_string())),
            _ => Err(problem("its name must end in .toml or .json".into())),
        }
    }

    /// Sets [`accumulation_steps`](Self::accumulation_steps).
    #[must_use]
    pub const fn with_accumulation_steps(mut self, accumulation_steps: NonZeroUsize) -> Self {
        self.accumulation_steps = accumulation_steps;
        self
    }

    /// Sets [`balance`](Self::balance).
    #[must_use]
    pub const fn with_balance(mut self, balance: RankBalance) -> Self {
        self.balance = balance;
        self
    }

    /// Sets [`buffers`](Self::buffers).
    #[must_use]
    pub const fn with_buffers(mut self, buffers: BufferSync) -> Self {
        self.buffers = buffers;
        self
    }

    /// Sets [`group`](Self::group).
    #[must_use]
    pub fn with_group(self, group: ProcessGroupOptions) -> Self {
        Self { group, ..self }
    }

    /// Sets [`reduction`](SyncOptions::reduction).
    #[must_use]
    pub const fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.sync.reduction = reduction;
        self
    }

    /// Sets [`reduce_dtype`](SyncOptions::reduce_dtype).
    #[must_use]
    pub const fn with_reduce_dtype(mut self, reduce_dtype: ReduceDType) -> Self {
        self.sync.reduce_dtype = reduce_dtype;
        self
    }

    /// Sets [`first_bucket_cap_bytes`](SyncOptions::first_bucket_cap_bytes).
    #[must_use]
    pub const fn with_first_bucket_cap_bytes(mut self, first_bucket_cap_bytes: usize) -> Self {
        self.sync.first_bucket_cap_bytes = first_bucket_cap_bytes;
        self
    }

    /// Sets [`bucket_cap_bytes`](SyncOptions::bucket_cap_bytes).
    #[must_use]
    pub const fn with_bucket_cap_bytes(mut self, bucket_cap_bytes: usize) -> Self {
        self.sync.bucket_cap_bytes = bucket_cap_bytes;
        self
    }

    /// Sets [`average_every`](SyncOptions::average_every).
    #[must_use]
    pub const fn with_average_every(mut self, average_every: Option<NonZeroUsize>) -> Self {
        self.sync.average_every = average_every;
        self
    }

    /// Sets [`check_every`](SyncOptions::check_every).
    #[must_use]
    pub const fn with_check_every(mut self, check_every: Option<NonZeroUsize>) -> Self {
        self.sync.check_every = check_every;
        self
    }
}

impl fmt::Display for DataParallelConfig {
    /// As TOML, from which it can be read again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&toml::to_string(self).map_err(|_| fmt::Error)?)
    }
}
