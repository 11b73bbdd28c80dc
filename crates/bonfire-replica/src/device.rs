//! The device of a replica: a list of member devices that Burn sees as one.

use std::{
    any::{Any, TypeId},
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use bonfire_collectives::Counts;
use bonfire_placement::{ShareSchedule, Shares};
use burn_backend::{Device, DeviceId, DeviceOps};

use crate::{Member, RandomMode, RandomState, ReplicaError, ReplicaOptions, group::Group, options::Environment};

/// Several devices of `B` that a [`Replica<B>`](crate::Replica) uses as one.
///
/// `ReplicaDevice::default()` holds every visible accelerator, or one member per core of a CPU backend (at most 8); it
/// is the same group each time it is asked for, until that group breaks. The environment narrows it: see
/// [`Environment`].
///
/// ```
/// use bonfire_replica::ReplicaDevice;
/// use burn_flex::{Flex, FlexDevice};
///
/// let device = ReplicaDevice::<Flex>::new([FlexDevice, FlexDevice])?;
/// assert_eq!(device.num_members(), 2);
/// # Ok::<(), bonfire_replica::ReplicaError>(())
/// ```
pub struct ReplicaDevice<B: Member> {
    pub(crate) group: Arc<Group<B>>,
}

impl<B: Member> ReplicaDevice<B> {
    /// A group with one member per listed device. A CPU device may be listed several times: each member has its own
    /// thread.
    ///
    /// # Errors
    ///
    /// [`ReplicaError::NoMembers`] for an empty list, [`ReplicaError::TooManyMembers`] for a very long one,
    /// [`ReplicaError::Start`] if a thread cannot be started, [`ReplicaError::TooManyGroups`] after 65,536 groups.
    pub fn new(devices: impl IntoIterator<Item = B::Device>) -> Result<Self, ReplicaError> {
        Self::with_options(devices, ReplicaOptions::default())
    }

    /// As [`new`](Self::new), with settings.
    ///
    /// # Errors
    ///
    /// Also [`ReplicaError::Shares`] and [`ReplicaError::Option`] for settings that do not fit the members.
    pub fn with_options(
        devices: impl IntoIterator<Item = B::Device>,
        options: ReplicaOptions,
    ) -> Result<Self, ReplicaError> {
        let index = Registry::<B>::with(Registry::reserve)?;
        let group = Arc::new(Group::start(index, devices.into_iter().collect(), options)?);
        Registry::with(|registry| registry.groups[usize::from(index)] = Arc::downgrade(&group));
        Ok(Self { group })
    }

    /// What [`default`](Self::default) returns, without its panic.
    ///
    /// # Errors
    ///
    /// [`ReplicaError::Environment`] for a variable that cannot be read, and those of
    /// [`with_options`](Self::with_options).
    pub fn from_env() -> Result<Self, ReplicaError> {
        if let Some(device) = Registry::with(|registry| registry.default.clone())
            && device.group.broken().is_none()
        {
            return Ok(device);
        }
        let environment = Environment::read()?;
        let mut devices = B::default_devices();
        if let Some(num_members) = environment.num_members {
            // Accelerators: the first ones. CPU members: as many as asked for, since they are threads.
            let first = devices.first().cloned().unwrap_or_default();
            if !B::DEVICES_REPEAT && num_members > devices.len() {
                return Err(ReplicaError::Environment {
                    variable: "BONFIRE_MEMBERS",
                    value: num_members.to_string(),
                    expected: "at most the number of visible devices",
                });
            }
            devices.resize(num_members, first);
        }
        let device = Self::with_options(devices, environment.options)?;
        // Two threads may have come this far: both take the one that was stored first.
        Ok(Registry::with(|registry| match &registry.default {
            Some(stored) if stored.group.broken().is_none() => stored.clone(),
            _ => registry.default.insert(device).clone(),
        }))
    }

    /// Number of members.
    pub fn num_members(&self) -> usize {
        self.group.num_members()
    }

    /// The members' devices, in rank order. Tensors that are not spread yet live on the first.
    pub fn members(&self) -> &[B::Device] {
        &self.group.devices
    }

    /// The settings this group was made with.
    pub fn options(&self) -> &ReplicaOptions {
        &self.group.options
    }

    /// Which collectives the members have run so far, and their bytes.
    pub fn collectives(&self) -> &Counts {
        self.group.counts()
    }

    /// How batches are shared out now: as the options say, or as [`Balance`](crate::Balance) has changed it since.
    pub fn shares(&self) -> Shares {
        self.group.shares().into_owned()
    }

    /// Which shares [`Balance::Auto`](crate::Balance::Auto) has chosen so far, from the start on: all that
    /// [`Balance::Replay`](crate::Balance::Replay) needs to train again to the same bits. Of a replay, what is replayed;
    /// `None` where shares are fixed.
    ///
    /// ```
    /// use bonfire_replica::{Balance, ReplicaDevice, ReplicaOptions};
    /// use burn_flex::{Flex, FlexDevice};
    ///
    /// let members = [FlexDevice, FlexDevice];
    /// let auto = ReplicaOptions { balance: Balance::Auto, ..Default::default() };
    /// let device = ReplicaDevice::<Flex>::with_options(members, auto)?;
    /// // .. train on `device` ..
    /// let schedule = device.share_schedule().expect("shares are recorded");
    /// let again = ReplicaOptions { balance: Balance::Replay(schedule), ..Default::default() };
    /// let device = ReplicaDevice::<Flex>::with_options(members, again)?;
    /// # Ok::<(), bonfire_replica::ReplicaError>(())
    /// ```
    pub fn share_schedule(&self) -> Option<ShareSchedule> {
        self.group.balancer.as_ref().map(|balancer| balancer.schedule())
    }

    /// Where the draws have got to, for a checkpoint; `None` with [`RandomMode::Stream`], since the generators of Burn's
    /// backends cannot be read.
    pub fn random_state(&self) -> Option<RandomState> {
        match self.group.options.random {
            RandomMode::Stream => None,
            RandomMode::Counter => Some(*self.group.random()),
        }
    }

    /// Goes on drawing from where [`random_state`](Self::random_state) was asked for, on this or any other device.
    ///
    /// # Errors
    ///
    /// [`ReplicaError::Option`] with [`RandomMode::Stream`].
    pub fn set_random_state(&self, state: RandomState) -> Result<(), ReplicaError> {
        match self.group.options.random {
            RandomMode::Stream => Err(ReplicaError::Option {
                option: "random",
                value: "stream".into(),
                expected: "counter, to set the state of the draws: the inner backend's own has no state to set",
            }),
            RandomMode::Counter => {
                *self.group.random() = state;
                Ok(())
            }
        }
    }

    /// Why this group can no longer be used: the first failure of a member.
    pub fn broken(&self) -> Option<&ReplicaError> {
        self.group.broken()
    }
}

impl<B: Member> Default for ReplicaDevice<B> {
    /// Every visible device, narrowed by the [environment](Environment).
    ///
    /// # Panics
    ///
    /// Where [`from_env`](Self::from_env) gives an error.
    fn default() -> Self {
        Self::from_env().unwrap_or_else(|error| panic!("{error}"))
    }
}

impl<B: Member> Clone for ReplicaDevice<B> {
    fn clone(&self) -> Self {
        Self { group: self.group.clone() }
    }
}

impl<B: Member> PartialEq for ReplicaDevice<B> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.group, &other.group)
    }
}

impl<B: Member> Eq for ReplicaDevice<B> {}

impl<B: Member> fmt::Debug for ReplicaDevice<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReplicaDevice({}: {:?})", self.to_id().index_id, self.group.devices)
    }
}

impl<B: Member> Device for ReplicaDevice<B> {
    /// # Panics
    ///
    /// If no device of this id is alive.
    fn from_id(id: DeviceId) -> Self {
        Registry::with(|registry| registry.find(id))
            .unwrap_or_else(|| panic!("no replica device {} is alive in this process", id.index_id))
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 0, index_id: self.group.index }
    }
}

impl<B: Member> DeviceOps for ReplicaDevice<B> {}

/// The groups of one backend type, so that Burn can find a device by its id.
struct Registry<B: Member> {
    groups: Vec<Weak<Group<B>>>,
    default: Option<ReplicaDevice<B>>,
}

impl<B: Member> Registry<B> {
    /// The groups of `B`, whose ids are never used twice; each backend type has its own.
    fn with<R>(f: impl FnOnce(&mut Self) -> R) -> R {
        static REGISTRIES: Mutex<Option<HashMap<TypeId, Box<dyn Any + Send>>>> = Mutex::new(None);
        let mut registries = REGISTRIES.lock().unwrap_or_else(PoisonError::into_inner);
        let registry = registries
            .get_or_insert_default()
            .entry(TypeId::of::<B>())
            .or_insert_with(|| Box::new(Self { groups: Vec::new(), default: None }));
        f(registry.downcast_mut().expect("stored under its own type"))
    }

    /// The index of a group that is about to start.
    fn reserve(&mut self) -> Result<u16, ReplicaError> {
        let index =
            u16::try_from(self.groups.len()).map_err(|_| ReplicaError::TooManyGroups { limit: self.groups.len() })?;
        self.groups.push(Weak::new());
        Ok(index)
    }

    fn find(&self, id: DeviceId) -> Option<ReplicaDevice<B>> {
        let group = self.groups.get(usize::from(id.index_id))?.upgrade()?;
        Some(ReplicaDevice { group })
    }
}
