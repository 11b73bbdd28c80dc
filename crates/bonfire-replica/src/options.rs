//! How a group of members is set up, by fields or by the environment.

use std::time::Duration;

use bonfire_placement::{ShareSchedule, Shares};

use crate::ReplicaError;

/// When a tensor that is still on the home device is spread over the members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Spread {
    /// As with [`OnHeavyOp`](Self::OnHeavyOp), from half a million multiply-adds on. One member has nobody to share with:
    /// everything stays at home, runs on the calling thread, and costs what it costs without a replica.
    #[default]
    Auto,
    /// By the first linear, matmul, convolution or embedding of at least `min_work` multiply-adds that reads it; until
    /// then operations run on the calling thread as they would without a replica.
    OnHeavyOp {
        /// Multiply-adds from which an operation is worth sharing.
        min_work: usize,
    },
    /// At once, along dim 0. For tests: it makes every operation run on parts.
    Eager,
}

impl Spread {
    /// Some tens of microseconds of a core; handing an operation to a member that sleeps costs about as much.
    const HEAVY_WORK: usize = 1 << 19;

    /// Of the operations that may be worth sharing: the multiply-adds from which they are.
    pub(crate) fn min_work(self, num_members: usize) -> usize {
        match self {
            Spread::Auto if num_members == 1 => usize::MAX,
            Spread::Auto => Self::HEAVY_WORK,
            // Light operations have no work.
            Spread::OnHeavyOp { min_work } => min_work.max(1),
            Spread::Eager => 0,
        }
    }
}

/// How shares change from step to step.
///
/// A step ends where an operation on whole values (an optimizer's first, a norm to clip by) asks for gradients, and all
/// that the calling thread has made are summed. Steps are counted per device; with several threads that train on one
/// device, in the order in which their steps end. Passes without gradients change nothing, and neither do gradients that
/// are never whole: with [`Spread::Eager`] parameters are shared out themselves, and plain SGD keeps them so. Between two ends the shares
/// stay as they are, for all threads; what is alive when they change keeps its parts, and is brought into new ones where
/// it meets them.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Balance {
    /// Not at all.
    #[default]
    Fixed,
    /// By what members are measured to take, so that a slow or busy one does not hold the others: from
    /// [`ReplicaOptions::shares`] (equal, or weights above zero) to those with which all end a step together. The
    /// medians of eight steps decide, and nothing changes that would not save a twentieth of a step in both halves of
    /// them. Each member keeps at least a row, so that it is measured again; with fewer rows than members nothing changes,
    /// and a member that has no rows of a batch keeps what was last known of it. One that never had a row
    /// is taken for as slow as the slowest.
    ///
    /// Two runs may choose other shares, and then sum in another order:
    /// [`share_schedule`](crate::ReplicaDevice::share_schedule) records what was chosen, for a replay.
    Auto,
    /// As recorded by an earlier run, or written by hand: with the same members, seed and program, the same bits, if one
    /// thread alone shares tensors out. Where a second one does (it evaluates while the first trains), what it finds
    /// depends on the step that the first has come to.
    Replay(ShareSchedule),
}

/// Where random numbers come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum RandomMode {
    /// The inner backend's stream, on the thread that asks: with one seed, the numbers of one plain device.
    #[default]
    Stream,
    /// Philox, of the seed, the number of the draw and the position of the element: other numbers than the inner
    /// backend's, but the same for any shares, placements and number of members. Each member makes its own part, and the
    /// state can be [read](crate::ReplicaDevice::random_state) and [set](crate::ReplicaDevice::set_random_state). Draws
    /// are numbered per device, in the order in which they are asked for; the seed is 0 until Burn's `seed` sets it.
    Counter,
}

/// Settings of a [`ReplicaDevice`](crate::ReplicaDevice).
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct ReplicaOptions {
    /// How a batch is shared out among the members; at first, if the shares change.
    pub shares: Shares,
    /// How the shares change.
    pub balance: Balance,
    /// Threads of each member's own rayon pool; unset: the cores divided by the members, at least one.
    pub threads_per_member: Option<usize>,
    /// When tensors are spread over the members.
    pub spread: Spread,
    /// Where random numbers come from.
    pub random: RandomMode,
    /// Operations a member's queue holds before the caller waits.
    pub max_queued_ops: usize,
    /// Bytes of tensors on their way from the home device that the queues hold before the caller waits.
    pub max_queued_bytes: usize,
    /// How long to wait for a member that makes no progress, and for members in a collective.
    pub timeout: Duration,
}

impl Default for ReplicaOptions {
    fn default() -> Self {
        Self {
            shares: Shares::Equal,
            balance: Balance::default(),
            threads_per_member: None,
            spread: Spread::default(),
            random: RandomMode::default(),
            max_queued_ops: 1024,
            max_queued_bytes: 1 << 30,
            timeout: Duration::from_secs(600),
        }
    }
}

const MAX_QUEUED_OPS: usize = 1 << 20;

impl ReplicaOptions {
    pub(crate) fn validate(&self, num_members: usize) -> Result<(), ReplicaError> {
        let at_least_one = |option, value: usize| match value {
            0 => Err(ReplicaError::Option { option, value: "0".into(), expected: "at least 1" }),
            _ => Ok(()),
        };
        at_least_one("threads_per_member", self.threads_per_member.unwrap_or(1))?;
        at_least_one("max_queued_ops", self.max_queued_ops)?;
        if self.max_queued_ops > MAX_QUEUED_OPS {
            return Err(ReplicaError::Option {
                option: "max_queued_ops",
                value: self.max_queued_ops.to_string(),
                expected: "at most 1,048,576: the queue's room is set aside at once",
            });
        }
        at_least_one("max_queued_bytes", self.max_queued_bytes)?;
        if self.timeout.is_zero() {
            return Err(ReplicaError::Option {
                option: "timeout",
                value: "0 s".into(),
                expected: "a duration above zero",
            });
        }
        let shares = match &self.shares {
            // Alone, the first member would have to take the rest as well.
            Shares::First(_) if num_members == 1 => self.shares.lengths(usize::MAX, 1).map(drop),
            shares => shares.validate(num_members),
        };
        let misfit = |reason| ReplicaError::Shares { num_members, reason };
        shares.map_err(misfit)?;
        match (&self.balance, &self.shares) {
            (Balance::Fixed, _) | (Balance::Auto, Shares::Equal) => Ok(()),
            (Balance::Auto, Shares::Weighted(weights)) if !weights.contains(&0) => Ok(()),
            (Balance::Auto, Shares::Weighted(_) | Shares::First(_)) => Err(ReplicaError::Option {
                option: "shares",
                value: format!("{:?}", self.shares),
                expected: "equal, or weights above zero, for Balance::Auto to start from",
            }),
            (Balance::Replay(schedule), _) => schedule.validate(num_members).map_err(misfit),
        }
    }
}

/// What the environment says of the default device; the one place where it is read.
///
/// | variable | meaning |
/// |---|---|
/// | `BONFIRE_MEMBERS` | members of the default device; if unset, one per weight of `BONFIRE_SHARES` |
/// | `BONFIRE_THREADS_PER_MEMBER` | [`ReplicaOptions::threads_per_member`] |
/// | `BONFIRE_SHARES` | weights of the members, as `2,3,3`; or `auto` for [`Balance::Auto`], from equal shares on |
/// | `BONFIRE_SPREAD` | `auto` (default), `heavy` or `eager` |
/// | `BONFIRE_RANDOM` | `stream` (default) or `counter` |
/// | `BONFIRE_TIMEOUT_SECONDS` | [`ReplicaOptions::timeout`] |
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Environment {
    /// `BONFIRE_MEMBERS`.
    pub num_members: Option<usize>,
    /// Defaults, changed by the other variables.
    pub options: ReplicaOptions,
}

impl Environment {
    /// Reads the process environment.
    ///
    /// # Errors
    ///
    /// [`ReplicaError::Environment`] for a value that cannot be read.
    pub fn read() -> Result<Self, ReplicaError> {
        Self::from_lookup(|variable| std::env::var_os(variable).map(|value| value.to_string_lossy().into_owned()))
    }

    /// As [`read`](Self::read), from any source of variables. An empty value counts as unset.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn from_lookup(lookup: impl Fn(&'static str) -> Option<String>) -> Result<Self, ReplicaError> {
        let lookup = |variable| lookup(variable).filter(|value| !value.trim().is_empty());
        let number = |variable| positive(variable, lookup(variable));

        let mut environment = Self { num_members: number("BONFIRE_MEMBERS")?, ..Self::default() };
        let options = &mut environment.options;
        options.threads_per_member = number("BONFIRE_THREADS_PER_MEMBER")?;
        if let Some(seconds) = number("BONFIRE_TIMEOUT_SECONDS")? {
            options.timeout = Duration::from_secs(seconds as u64);
        }
        if let Some(value) = lookup("BONFIRE_SHARES") {
            if value.trim() == "auto" {
                options.balance = Balance::Auto;
            } else {
                options.shares = weights(&value).ok_or(ReplicaError::Environment {
                    variable: "BONFIRE_SHARES",
                    value,
                    expected: "auto, or one whole number per member, separated by commas, as 2,3,3",
                })?;
            }
            if let Shares::Weighted(weights) = &options.shares {
                environment.num_members = environment.num_members.or(Some(weights.len()));
            }
        }
        if let Some(value) = lookup("BONFIRE_SPREAD") {
            options.spread = match value.trim() {
                "auto" => Spread::Auto,
                "heavy" => Spread::OnHeavyOp { min_work: Spread::HEAVY_WORK },
                "eager" => Spread::Eager,
                _ => {
                    return Err(ReplicaError::Environment {
                        variable: "BONFIRE_SPREAD",
                        value,
                        expected: "auto, heavy or eager",
                    });
                }
            };
        }
        if let Some(value) = lookup("BONFIRE_RANDOM") {
            options.random = match value.trim() {
                "stream" => RandomMode::Stream,
                "counter" => RandomMode::Counter,
                _ => {
                    return Err(ReplicaError::Environment {
                        variable: "BONFIRE_RANDOM",
                        value,
                        expected: "stream or counter",
                    });
                }
            };
        }
        Ok(environment)
    }
}

fn positive(variable: &'static str, value: Option<String>) -> Result<Option<usize>, ReplicaError> {
    let Some(value) = value else { return Ok(None) };
    match value.trim().parse::<usize>() {
        Ok(number) if number > 0 => Ok(Some(number)),
        _ => Err(ReplicaError::Environment { variable, value, expected: "a whole number of at least 1" }),
    }
}

fn weights(value: &str) -> Option<Shares> {
    let weights: Result<Vec<u32>, _> = value.split(',').map(|weight| weight.trim().parse()).collect();
    weights.ok().map(Shares::Weighted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment, ReplicaError> {
        Environment::from_lookup(|wanted| {
            variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn an_empty_environment_gives_the_defaults() {
        assert_eq!(read(&[]).unwrap(), Environment::default());
        assert_eq!(read(&[("BONFIRE_MEMBERS", " ")]).unwrap(), Environment::default());
    }

    #[test]
    fn every_variable_is_read() {
        let environment = read(&[
            ("BONFIRE_MEMBERS", "3"),
            ("BONFIRE_THREADS_PER_MEMBER", "2"),
            ("BONFIRE_SHARES", "2, 3,3"),
            ("BONFIRE_SPREAD", "eager"),
            ("BONFIRE_RANDOM", "counter"),
            ("BONFIRE_TIMEOUT_SECONDS", "7"),
        ])
        .unwrap();
        assert_eq!(environment.num_members, Some(3));
        assert_eq!(environment.options.threads_per_member, Some(2));
        assert_eq!(environment.options.shares, Shares::Weighted(vec![2, 3, 3]));
        assert_eq!(environment.options.spread, Spread::Eager);
        assert_eq!(environment.options.random, RandomMode::Counter);
        assert_eq!(environment.options.timeout, Duration::from_secs(7));
    }

    #[test]
    fn weights_alone_say_how_many_members_there_are() {
        assert_eq!(read(&[("BONFIRE_SHARES", "1,2,3")]).unwrap().num_members, Some(3));
    }

    #[test]
    fn shares_may_be_left_to_what_is_measured() {
        let environment = read(&[("BONFIRE_SHARES", " auto ")]).unwrap();
        assert_eq!((environment.options.balance, environment.options.shares), (Balance::Auto, Shares::Equal));
        assert_eq!(environment.num_members, None);
    }

    #[test]
    fn a_value_that_cannot_be_read_is_an_error_that_names_the_variable() {
        for (variable, value) in [
            ("BONFIRE_MEMBERS", "0"),
            ("BONFIRE_MEMBERS", "many"),
            ("BONFIRE_THREADS_PER_MEMBER", "-1"),
            ("BONFIRE_SHARES", "1,,2"),
            ("BONFIRE_SHARES", "auto,2"),
            ("BONFIRE_SPREAD", "lazy"),
            ("BONFIRE_RANDOM", "dice"),
            ("BONFIRE_TIMEOUT_SECONDS", "1.5"),
        ] {
            let message = read(&[(variable, value)]).unwrap_err().to_string();
            assert!(message.contains(variable) && message.contains(value), "{message}");
        }
    }

    #[test]
    fn options_that_could_not_work_are_refused() {
        let refused = [
            ReplicaOptions { threads_per_member: Some(0), ..Default::default() },
            ReplicaOptions { max_queued_ops: 0, ..Default::default() },
            ReplicaOptions { max_queued_ops: usize::MAX, ..Default::default() },
            ReplicaOptions { max_queued_bytes: 0, ..Default::default() },
            ReplicaOptions { timeout: Duration::ZERO, ..Default::default() },
            ReplicaOptions { shares: Shares::Weighted(vec![1, 1, 1]), ..Default::default() },
            ReplicaOptions { shares: Shares::First(2), balance: Balance::Auto, ..Default::default() },
            ReplicaOptions { shares: Shares::Weighted(vec![0, 1]), balance: Balance::Auto, ..Default::default() },
        ];
        for options in refused {
            assert!(options.validate(2).is_err(), "{options:?}");
        }
        ReplicaOptions::default().validate(2).unwrap();
    }
}
