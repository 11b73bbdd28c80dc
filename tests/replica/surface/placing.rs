//! Inputs with the placement that is wanted of them.

use std::{cell::RefCell, collections::HashMap};

use bonfire::{Placement, Replica, ReplicaDevice, ReplicaOptions, Shares, placement::PartialOp};
use burn::tensor::{DType, Scalar, Shape, Slice, TensorData, backend::Backend};
use burn_backend::{
    BoolDType,
    ops::{BoolTensorOps, FloatTensorOps, IntTensorOps},
    tensor::{BoolTensor, FloatTensor},
};
use burn_flex::{Flex, FlexDevice};

use super::{
    case::{Any, Input, Of, Values},
    values::{constant, lower_rows, summands, values},
};
use crate::runs::ALWAYS;

type Ours = Replica<Flex>;

/// How an input lies on the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    Local,
    Replicate,
    /// One value, not zero.
    Fill,
    Zeros,
    Sum,
    Max,
    Min,
    Shard(usize),
}

impl Place {
    /// Whether all elements are one value, which makes it another tensor.
    pub fn is_constant(self) -> bool {
        matches!(self, Place::Fill | Place::Zeros)
    }
}

/// All placements that an input can have.
pub fn places(input: &Input, of_case: DType) -> Vec<Place> {
    let dtype = input.dtype(of_case);
    let shards = (0..input.shape.len()).filter(|&dim| input.shape[dim] > 1).map(Place::Shard);
    let mut places = vec![Place::Local, Place::Replicate];
    if input.shape.contains(&0) && input.dtype != Of::Quantized {
        places.push(Place::Zeros);
        places.extend(shards);
        return places;
    }
    let can_vary = !matches!(input.values, Values::Listed(_));
    match (input.dtype, dtype) {
        // Never shared out, nor made of one value.
        (Of::Quantized, _) => return places,
        (_, DType::Bool(_)) => places.extend([Place::Fill, Place::Zeros]),
        (_, dtype) => {
            if can_vary && input.values != Values::Special {
                places.push(Place::Fill);
            }
            if matches!(input.values, Values::Mixed | Values::Unit | Values::Small | Values::Ties | Values::Below(_)) {
                places.push(Place::Zeros);
            }
            // Halves are summed whole.
            if !matches!(dtype, DType::F16 | DType::BF16) {
                places.push(Place::Sum);
            }
            if input.values != Values::Special {
                places.extend([Place::Max, Place::Min]);
            }
        }
    }
    places.extend(shards);
    places
}

/// The input as a fresh tensor of any backend.
pub fn fresh<B: Backend>(input: &Input, of_case: DType, place: Place, device: &B::Device) -> Any<B> {
    let dtype = input.dtype(of_case);
    if !place.is_constant() {
        return from_data::<B>(input, values(input.values, dtype, &input.shape), device);
    }
    let shape = Shape::from(input.shape.clone());
    let value = if place == Place::Zeros { 0.0 } else { constant(input.values, dtype) };
    match dtype {
        DType::Bool(_) if value == 0.0 => Any::Bool(B::bool_zeros(shape, device, dtype.into())),
        DType::Bool(_) => Any::Bool(B::bool_ones(shape, device, dtype.into())),
        _ if dtype.is_float() => Any::Float(B::float_full(shape, Scalar::Float(value), device, dtype.into())),
        _ => Any::Int(B::int_full(shape, Scalar::Int(value as i64), device, dtype.into())),
    }
}

fn from_data<B: Backend>(input: &Input, data: TensorData, device: &B::Device) -> Any<B> {
    match (input.dtype, data.dtype) {
        (Of::Quantized, _) => {
            Any::Quantized(B::quantize_dynamic(B::float_from_data(data, device), &Default::default()))
        }
        (_, DType::Bool(_)) => Any::Bool(B::bool_from_data(data, device)),
        (_, dtype) if dtype.is_float() => Any::Float(B::float_from_data(data, device)),
        _ => Any::Int(B::int_from_data(data, device)),
    }
}

/// A replica, and masks on it that spread what they are applied to.
pub struct Bench {
    pub device: ReplicaDevice<Flex>,
    masks: RefCell<HashMap<(usize, usize, usize), BoolTensor<Ours>>>,
}

impl Bench {
    pub fn new(num_members: usize, shares: Shares) -> Self {
        let timeout = std::time::Duration::from_secs(60);
        let options = ReplicaOptions { shares, spread: ALWAYS, timeout, ..Default::default() };
        let device = ReplicaDevice::with_options(vec![FlexDevice; num_members], options).unwrap();
        Self { device, masks: RefCell::default() }
    }

    /// The input, placed so.
    ///
    /// # Panics
    ///
    /// If it turns out to lie in another way: the library spreads tensors otherwise than this file thinks.
    pub fn place(&self, input: &Input, of_case: DType, place: Place) -> Any<Ours> {
        let dtype = input.dtype(of_case);
        let rank = input.shape.len();
        let local = || fresh::<Ours>(input, of_case, Place::Local, &self.device);
        let placed = match place {
            Place::Local | Place::Fill | Place::Zeros => fresh::<Ours>(input, of_case, place, &self.device),
            Place::Replicate if input.dtype == Of::Quantized => {
                let float = Input { dtype: Of::Always(DType::F32), ..input.clone() };
                let dim = (0..rank).find(|&dim| input.shape[dim] > 1).map_or(Place::Replicate, Place::Shard);
                let Any::Float(spread) = self.place(&float, of_case, dim) else { panic!("it is a float tensor") };
                Any::Quantized(<Ours as burn_backend::ops::QTensorOps<Ours>>::quantize_dynamic(
                    spread,
                    &Default::default(),
                ))
            }
            Place::Replicate => where_mask(self.mask(rank, 0, 1), local()),
            Place::Shard(dim) => where_mask(self.mask(rank, dim, input.shape[dim]), local()),
            Place::Sum => self.reduced(input, summands(input.values, dtype, &input.shape), PartialOp::Sum),
            Place::Max => self.reduced(input, lower_rows(input.values, dtype, &input.shape, -1.0), PartialOp::Max),
            Place::Min => self.reduced(input, lower_rows(input.values, dtype, &input.shape, 1.0), PartialOp::Min),
        };
        let found = placement(&placed).expect("a tensor has a placement");
        let is_right = match (place, &found) {
            (Place::Local, Placement::Local) | (Place::Replicate, Placement::Replicate) => true,
            (Place::Fill | Place::Zeros, Placement::Fill) => true,
            (Place::Sum, Placement::Partial { op }) => *op == PartialOp::Sum,
            (Place::Max, Placement::Partial { op }) => *op == PartialOp::Max,
            (Place::Min, Placement::Partial { op }) => *op == PartialOp::Min,
            (Place::Shard(dim), Placement::Shard { dim: found, .. }) => dim == *found,
            _ => false,
        };
        assert!(is_right, "{input:?} of {dtype:?} became {found} instead of {place:?}");
        placed
    }

    /// All true: sharded on `dim` of `length`, other dims of length 1; replicated for a length of 1.
    fn mask(&self, rank: usize, dim: usize, length: usize) -> BoolTensor<Ours> {
        let make = || {
            let spread = self.anchor(length.max(2));
            let spread = match length {
                // Every member needs all of it to sort it.
                1 => Ours::float_slice(Ours::float_sort(spread, 0, false), &[Slice::from(0..1)]),
                _ => spread,
            };
            let mut shape = vec![1; rank];
            if let Some(slot) = shape.get_mut(dim) {
                *slot = length;
            }
            let mask = Ours::float_greater_elem(spread, Scalar::Float(0.0), BoolDType::Native);
            Ours::bool_reshape(mask, Shape::from(shape))
        };
        self.masks.borrow_mut().entry((rank, dim, length)).or_insert_with(make).clone()
    }

    /// Ones `[length, 1]`, which a product has shared out.
    fn anchor(&self, length: usize) -> FloatTensor<Ours> {
        let ones = |shape: [usize; 2]| {
            let data = TensorData::full(Shape::from(shape), 1.0f32);
            Ours::float_from_data(data, &self.device)
        };
        Ours::float_matmul(ones([length, 1]), ones([1, 1]))
    }

    /// What `rows`, `[num_rows, ..shape]`, are together, left in parts.
    fn reduced(&self, input: &Input, rows: TensorData, op: PartialOp) -> Any<Ours> {
        let num_rows = rows.shape[0];
        let shape = Shape::from(input.shape.clone());
        let rows = from_data::<Ours>(&Input { shape: rows.shape.to_vec(), ..input.clone() }, rows, &self.device);
        match where_mask(self.mask(input.shape.len() + 1, 0, num_rows), rows) {
            Any::Float(rows) => Any::Float(Ours::float_reshape(
                match op {
                    PartialOp::Sum => Ours::float_sum_dim(rows, 0),
                    PartialOp::Max => Ours::float_max_dim(rows, 0),
                    PartialOp::Min => Ours::float_min_dim(rows, 0),
                },
                shape,
            )),
            Any::Int(rows) => Any::Int(Ours::int_reshape(
                match op {
                    PartialOp::Sum => Ours::int_sum_dim(rows, 0),
                    PartialOp::Max => Ours::int_max_dim(rows, 0),
                    PartialOp::Min => Ours::int_min_dim(rows, 0),
                },
                shape,
            )),
            other => panic!("{other:?} has no parts that combine"),
        }
    }
}

/// `value`, which takes the placement of a mask that holds everywhere.
fn where_mask(mask: BoolTensor<Ours>, value: Any<Ours>) -> Any<Ours> {
    let (shape, dtype) = value.told();
    let device = Ours::bool_device(&mask);
    match value {
        Any::Float(value) => {
            Any::Float(Ours::float_mask_where(Ours::float_zeros(shape, &device, dtype.into()), mask, value))
        }
        Any::Int(value) => Any::Int(Ours::int_mask_where(Ours::int_zeros(shape, &device, dtype.into()), mask, value)),
        Any::Bool(value) => {
            Any::Bool(Ours::bool_mask_where(Ours::bool_zeros(shape, &device, dtype.into()), mask, value))
        }
        other => panic!("{other:?} cannot be masked"),
    }
}

/// `None` for what is no tensor.
pub fn placement(any: &Any<Ours>) -> Option<Placement> {
    match any {
        Any::Float(tensor) => Some(tensor.placement().clone()),
        Any::Int(tensor) => Some(tensor.placement().clone()),
        Any::Bool(tensor) => Some(tensor.placement().clone()),
        Any::Quantized(tensor) => Some(tensor.placement().clone()),
        Any::Data(_) => None,
    }
}
