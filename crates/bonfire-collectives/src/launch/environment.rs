//! What launchers leave in the environment; the one place that knows their variables.

use std::fmt;

use super::{LaunchError, Token, nodes::first_node};
use crate::fingerprint::fingerprint;

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Nobody that says so: a single process.
    Alone,
    /// torchrun, or its variables set by hand.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// Slurm's srun.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alone => "no launcher",
            Self::Torchrun => "torchrun's variables",
            Self::OpenMpi => "Open MPI",
            Self::Slurm => "Slurm",
        })
    }
}

/// What the variables of a process say of its launch.
///
/// | | torchrun | Open MPI | Slurm |
/// |---|---|---|---|
/// | rank | `RANK` | `OMPI_COMM_WORLD_RANK` | `SLURM_PROCID` |
/// | local rank | `LOCAL_RANK` | `OMPI_COMM_WORLD_LOCAL_RANK` | `SLURM_LOCALID` |
/// | world size | `WORLD_SIZE` | `OMPI_COMM_WORLD_SIZE` | `SLURM_STEP_NUM_TASKS`, else `SLURM_NTASKS` |
/// | address | `MASTER_ADDR` | `MASTER_ADDR`; if all ranks are on one node: that node | `MASTER_ADDR`, else the first node of `SLURM_STEP_NODELIST`, `SLURM_JOB_NODELIST` or `SLURM_NODELIST` |
/// | port | `MASTER_PORT` | `MASTER_PORT`, else from the job's name | `MASTER_PORT`, else from job and step |
/// | token | `BONFIRE_TOKEN`, else the run | `BONFIRE_TOKEN`, else the job | `BONFIRE_TOKEN`, else job and step |
///
/// torchrun itself (`TORCHELASTIC_RUN_ID`) goes first, since mpirun or srun may have started it; then Open MPI, which may
/// run in a Slurm job; then Slurm; then torchrun's variables set by hand. Those must agree with a launcher that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchEnvironment {
    /// Whose variables count.
    pub launcher: Launcher,
    pub(super) rank: Setting,
    pub(super) local_rank: Setting,
    pub(super) world_size: Setting,
    pub(super) address: Option<String>,
    pub(super) address_name: &'static str,
    pub(super) port: Option<u16>,
    pub(super) token: Token,
}

/// A number, and the variable or option it comes from; none: a default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) value: usize,
    pub(super) source: Option<&'static str>,
}

impl Setting {
    pub(super) fn name(self) -> &'static str {
        self.source.unwrap_or("the default")
    }
}

/// Derived ports lie below those that Linux gives to outgoing connections.
const FIRST_DERIVED_PORT: u16 = 20_000;
const NUM_DERIVED_PORTS: u64 = 10_000;

impl LaunchEnvironment {
    /// Reads variables from any source; an empty value counts as unset.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Value`] for a variable that counts and cannot be read, [`LaunchError::Incomplete`] if one is missing
    /// beside another, [`LaunchError::Contradiction`] if torchrun's variables, set by hand, differ from the launcher's,
    /// [`LaunchError::NotAStep`] in the batch script of a Slurm job of several tasks.
    pub fn from_lookup(lookup: impl Fn(&'static str) -> Option<String>) -> Result<Self, LaunchError> {
        let variables = Variables(lookup);
        if variables.get("TORCHELASTIC_RUN_ID").is_some() {
            return variables.torchrun();
        }
        let launched = match variables.open_mpi()? {
            Some(open_mpi) => Some(open_mpi),
            None => variables.slurm()?,
        };
        let by_hand = Family::TORCHRUN.read(&variables)?;
        match launched {
            Some(launched) => by_hand.check_agrees(&launched).map(|()| launched),
            None if by_hand.is_unset() => variables.meeting_point(Launcher::Alone, Place::ALONE, None),
            None => variables.torchrun(),
        }
    }

    /// A single process, whatever a launcher says, and the token.
    pub(super) fn token_alone(lookup: impl Fn(&'static str) -> Option<String>) -> Result<Self, LaunchError> {
        let token = Variables(lookup).get("BONFIRE_TOKEN").map(|text| named("BONFIRE_TOKEN", text)).transpose()?;
        let Place { rank, local_rank, world_size } = Place::ALONE;
        let token = token.unwrap_or_default();
        let (address, address_name, port) = (None, "MASTER_ADDR", None);
        Ok(Self { launcher: Launcher::Alone, rank, local_rank, world_size, address, address_name, port, token })
    }
}

/// The names by which a launcher says the three numbers.
struct Family {
    rank: &'static str,
    local_rank: &'static str,
    world_size: &'static str,
}

/// What of a family is set.
struct FamilyValues {
    family: Family,
    rank: Option<usize>,
    local_rank: Option<usize>,
    world_size: Option<usize>,
}

/// A family of which all is set.
struct Place {
    rank: Setting,
    local_rank: Setting,
    world_size: Setting,
}

impl Place {
    const ALONE: Self = Self {
        rank: Setting { value: 0, source: None },
        local_rank: Setting { value: 0, source: None },
        world_size: Setting { value: 1, source: None },
    };
}

impl Family {
    const TORCHRUN: Self = Self { rank: "RANK", local_rank: "LOCAL_RANK", world_size: "WORLD_SIZE" };
    const OPEN_MPI: Self = Self {
        rank: "OMPI_COMM_WORLD_RANK",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
    };
    const SLURM: Self = Self { rank: "SLURM_PROCID", local_rank: "SLURM_LOCALID", world_size: "SLURM_NTASKS" };
    const SLURM_STEP: Self = Self { world_size: "SLURM_STEP_NUM_TASKS", ..Self::SLURM };

    fn read(self, variables: &Variables<impl Lookup>) -> Result<FamilyValues, LaunchError> {
        Ok(FamilyValues {
            rank: variables.number(self.rank)?,
            local_rank: variables.number(self.local_rank)?,
            world_size: variables.number(self.world_size)?,
            family: self,
        })
    }
}

impl FamilyValues {
    fn named(&self) -> [(&'static str, Option<usize>); 3] {
        let Family { rank, local_rank, world_size } = self.family;
        [(rank, self.rank), (local_rank, self.local_rank), (world_size, self.world_size)]
    }

    fn is_unset(&self) -> bool {
        self.named().iter().all(|(_, value)| value.is_none())
    }

    fn complete(&self) -> Result<Place, LaunchError> {
        let named = self.named();
        let set = named.iter().find_map(|&(name, value)| Some((name, value?)));
        let setting = |(name, value): (&'static str, Option<usize>)| match (value, set) {
            (Some(value), _) => Ok(Setting { value, source: Some(name) }),
            (None, Some((set, value))) => Err(LaunchError::Incomplete { set, value: value.to_string(), missing: name }),
            (None, None) => unreachable!("a family is completed only if one of it is set"),
        };
        Ok(Place { rank: setting(named[0])?, local_rank: setting(named[1])?, world_size: setting(named[2])? })
    }

    fn check_agrees(&self, launched: &LaunchEnvironment) -> Result<(), LaunchError> {
        let settings = [launched.rank, launched.local_rank, launched.world_size];
        for ((variable, value), setting) in self.named().into_iter().zip(settings) {
            let Some(value) = value.filter(|&value| value != setting.value) else { continue };
            return Err(LaunchError::Contradiction {
                variable,
                value,
                launcher_variable: setting.name(),
                launcher_value: setting.value,
            });
        }
        Ok(())
    }
}

trait Lookup: Fn(&'static str) -> Option<String> {}

impl<F: Fn(&'static str) -> Option<String>> Lookup for F {}

struct Variables<F>(F);

impl<F: Lookup> Variables<F> {
    fn get(&self, variable: &'static str) -> Option<String> {
        self.0(variable).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn number(&self, variable: &'static str) -> Result<Option<usize>, LaunchError> {
        let Some(value) = self.get(variable) else { return Ok(None) };
        match value.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(LaunchError::Value { name: variable, value, expected: "a whole number of at least 0" }),
        }
    }

    fn port(&self) -> Result<Option<u16>, LaunchError> {
        let Some(value) = self.get("MASTER_PORT") else { return Ok(None) };
        match value.parse() {
            Ok(port) => Ok(Some(port)),
            Err(_) => Err(LaunchError::Value { name: "MASTER_PORT", value, expected: "a port from 0 to 65535" }),
        }
    }

    fn torchrun(&self) -> Result<LaunchEnvironment, LaunchError> {
        let values = Family::TORCHRUN.read(self)?;
        if values.is_unset() {
            let value = self.get("TORCHELASTIC_RUN_ID").unwrap_or_default();
            return Err(LaunchError::Incomplete { set: "TORCHELASTIC_RUN_ID", value, missing: "RANK" });
        }
        let run = self.get("TORCHELASTIC_RUN_ID").map(|run| {
            let restart = self.get("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
            format!("torchrun {run} {restart}")
        });
        let mut environment = self.meeting_point(Launcher::Torchrun, values.complete()?, run.as_deref())?;
        // torchrun's own store may listen on MASTER_PORT for as long as the run lasts.
        let is_taken = self.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        if let Some(port) = environment.port.filter(|_| is_taken) {
            let next = port.checked_add(1).ok_or_else(|| LaunchError::Value {
                name: "MASTER_PORT",
                value: port.to_string(),
                expected: "below 65535: torchrun's own store has that port, Bonfire's the next",
            })?;
            environment.port = Some(next);
        }
        Ok(environment)
    }

    fn open_mpi(&self) -> Result<Option<LaunchEnvironment>, LaunchError> {
        let values = Family::OPEN_MPI.read(self)?;
        if values.is_unset() {
            return Ok(None);
        }
        let place = values.complete()?;
        let num_local = self.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
        let is_one_node = num_local == Some(place.world_size.value);
        let job = self.get("PMIX_NAMESPACE").map(|job| format!("openmpi {job}"));
        let mut environment = self.meeting_point(Launcher::OpenMpi, place, job.as_deref())?;
        environment.derive_port(job.as_deref());
        if environment.address.is_none() && is_one_node {
            environment.address = Some("127.0.0.1".into());
        }
        Ok(Some(environment))
    }

    fn slurm(&self) -> Result<Option<LaunchEnvironment>, LaunchError> {
        let has_step_size = self.get("SLURM_STEP_NUM_TASKS").is_some();
        let family = if has_step_size { Family::SLURM_STEP } else { Family::SLURM };
        let (job, step) = (self.get("SLURM_JOB_ID"), self.get("SLURM_STEP_ID"));
        // An allocation without a step (salloc, or a batch script) says how many tasks it has room for; no task runs yet.
        let is_task = self.get(family.rank).is_some() || self.get(family.local_rank).is_some();
        let is_sized = self.get(family.world_size).is_some();
        if !is_task || (!is_sized && step.is_none() && job.is_some()) {
            return Ok(None);
        }
        let place = family.read(self)?.complete()?;
        if job.is_some() && step.is_none() && place.world_size.value > 1 {
            return Err(LaunchError::NotAStep { num_tasks: place.world_size.value });
        }
        let run = job.map(|job| format!("slurm {job}.{}", step.unwrap_or_default()));
        let mut environment = self.meeting_point(Launcher::Slurm, place, run.as_deref())?;
        environment.derive_port(run.as_deref());
        if environment.address.is_none() {
            let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
            if let Some((name, value)) = lists.iter().find_map(|&name| Some((name, self.get(name)?))) {
                let Some(node) = first_node(&value) else {
                    return Err(LaunchError::Value { name, value, expected: "a list of nodes, as node[03-05,7]" });
                };
                environment.address = Some(node);
                environment.address_name = name;
            }
        }
        Ok(Some(environment))
    }

    /// A place, with what is read for every launcher.
    fn meeting_point(
        &self,
        launcher: Launcher,
        place: Place,
        run: Option<&str>,
    ) -> Result<LaunchEnvironment, LaunchError> {
        let token = match self.get("BONFIRE_TOKEN") {
            Some(text) => named("BONFIRE_TOKEN", text)?,
            // Too long for a token, a run's name is still the same for all of its ranks.
            None => run.and_then(|run| Token::new(run).or_else(|_| Token::new(hex(run))).ok()).unwrap_or_default(),
        };
        let Place { rank, local_rank, world_size } = place;
        let (address, port) = (self.get("MASTER_ADDR"), self.port()?);
        let address_name = "MASTER_ADDR";
        Ok(LaunchEnvironment { launcher, rank, local_rank, world_size, address, address_name, port, token })
    }
}

impl LaunchEnvironment {
    /// Two runs on one node most often get different ports; if not, the second one is told that its port is taken.
    fn derive_port(&mut self, run: Option<&str>) {
        let derived = |run: &str| {
            let offset = fingerprint(run.as_bytes()) % NUM_DERIVED_PORTS;
            FIRST_DERIVED_PORT + u16::try_from(offset).expect("it is below ten thousand")
        };
        if self.world_size.value > 1 {
            self.port = self.port.or(run.map(derived));
        }
    }
}

fn hex(run: &str) -> String {
    format!("{:016x}", fingerprint(run.as_bytes()))
}

fn named(variable: &'static str, text: String) -> Result<Token, LaunchError> {
    Token::new(text).map_err(|error| match error {
        LaunchError::Value { value, expected, .. } => LaunchError::Value { name: variable, value, expected },
        other => other,
    })
}
