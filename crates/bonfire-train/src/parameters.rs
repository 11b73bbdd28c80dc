//! The tensors of a model in order: how ranks compare them, and how all come to start from rank 0's.
//!
//! Burn gives every parameter a random id, so the same parameter has another id on every rank: ranks match
//! parameters by their order alone.

use core::{fmt, marker::PhantomData};
use std::{
    collections::{HashMap, HashSet},
    vec,
};

use bonfire_collectives::{Buffer, BufferMut, Communicator, DType as WireDType};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    tensor::{Bool, DType, Int, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive, backend::Backend},
};

use crate::{TrainError, consistency::fingerprint};

/// One tensor of a model: a parameter, or a buffer such as a running mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Burn's id, which is this rank's own.
    pub id: ParamId,
    /// The path of fields that leads to it, such as `encoder.weight`.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// Its element type.
    pub dtype: DType,
    /// Whether it takes a gradient; of a tensor that occurs several times in the model only the first does.
    pub is_trained: bool,
}

impl Parameter {
    /// The number of elements.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.num_elements()
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = if self.is_trained { "trained" } else { "not trained" };
        write!(f, "`{}` ({:?} {:?}, {role})", self.name, self.dtype, self.shape.as_slice())
    }
}

/// All tensors of a model, in the order in which its modules are visited.
#[must_use]
pub fn parameters<B: Backend, M: Module<B>>(model: &M) -> Vec<Parameter> {
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    visit(model, |name, id, value| {
        let is_trained = value.requires_gradient() && seen.insert(id);
        let (shape, dtype) = value.shape_and_dtype();
        found.push(Parameter { id, name: name.join("."), shape, dtype, is_trained });
    });
    found
}

/// Where the trained parameters of a model are, in order.
pub(crate) fn trained_devices<B: Backend, M: Module<B>>(model: &M) -> Vec<B::Device> {
    let mut devices = Vec::new();
    let mut seen = HashSet::new();
    visit(model, |_, id, value: Value<'_, B>| {
        if let Some(device) = value.device_if_trained()
            && seen.insert(id)
        {
            devices.push(device);
        }
    });
    devices
}

/// Makes sure that all ranks have built the same model and want the same.
///
/// `setting` is any text that must be equal too. Costs one small collective if nothing differs.
///
/// # Errors
///
/// [`TrainError::RanksDiffer`] on every rank, naming the first tensor that differs from rank 0's and the lowest rank
/// where it does; [`TrainError::Collective`] if the ranks do not come together.
pub fn compare_parameters(
    communicator: &dyn Communicator,
    parameters: &[Parameter],
    setting: &str,
) -> Result<(), TrainError> {
    let lines: Vec<String> =
        core::iter::once(setting.to_owned()).chain(parameters.iter().map(Parameter::to_string)).collect();
    let name = |line: usize| line.checked_sub(1).map_or_else(|| "setting".into(), |index| format!("parameter {index}"));
    compare_lines(communicator, &lines, name)
}

/// Makes sure that all ranks have the same lines, which `name` names by their index.
///
/// # Errors
///
/// [`TrainError::RanksDiffer`] on every rank, [`TrainError::Collective`] if the ranks do not come together.
pub(crate) fn compare_lines(
    communicator: &dyn Communicator,
    lines: &[String],
    name: impl Fn(usize) -> String,
) -> Result<(), TrainError> {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let text = lines.iter().map(|line| line.replace('\n', " ")).collect::<Vec<_>>().join("\n");
    let own = [text.len() as u64, fingerprint(text.as_bytes())];
    let mut all = vec![0; 2 * world_size];
    communicator.all_gather(Buffer::from_slice(&own), &vec![2; world_size], BufferMut::from_slice(&mut all))?;
    if all.chunks(2).all(|theirs| theirs == own) {
        return Ok(());
    }

    let lengths: Vec<usize> = all.iter().step_by(2).map(|&length| length as usize).collect();
    let mut texts = vec![0; lengths.iter().sum()];
    communicator.all_gather(Buffer::from_slice(text.as_bytes()), &lengths, BufferMut::from_slice(&mut texts))?;
    let mut rest = texts.as_slice();
    let lists: Vec<Vec<String>> = lengths
        .iter()
        .map(|&length| {
            let (text, after) = rest.split_at(length);
            rest = after;
            String::from_utf8_lossy(text).lines().map(String::from).collect()
        })
        .collect();
    Err(first_difference(&lists).map_or_else(
        || TrainError::Internal { reason: "ranks with equal parameters have unequal fingerprints".into() },
        |Difference { differing, line, given, expected }| {
            let what = name(line);
            TrainError::RanksDiffer { rank, world_size, differing, what, given, expected }
        },
    ))
}

/// Gives every rank the values of rank 0's tensors, exactly; all are fresh leaves afterwards, ids stay each rank's own.
///
/// Ranks must have compared their parameters before. Running statistics that clones of a model share change in all
/// clones.
///
/// # Errors
///
/// [`TrainError::Read`] if a tensor cannot be read, [`TrainError::Collective`] if the ranks do not come together.
pub fn broadcast_parameters<B: Backend, M: Module<B>>(
    communicator: &dyn Communicator,
    model: M,
) -> Result<M, TrainError> {
    let mut values = read(&model)?;
    for value in &mut values {
        // Bytes, since a broadcast changes no value, and booleans come in several widths.
        let bytes = BufferMut::new(WireDType::U8, &mut value.bytes)?;
        if bytes.num_bytes() > 0 {
            communicator.broadcast(bytes, 0)?;
        }
    }
    Ok(replace(model, values.into_iter().map(Some).collect()))
}

/// The values of all tensors of a model, in order.
///
/// # Errors
///
/// [`TrainError::Read`] if a tensor cannot be read.
pub(crate) fn read<B: Backend, M: Module<B>>(model: &M) -> Result<Vec<TensorData>, TrainError> {
    let mut values = Vec::new();
    let mut problem = None;
    visit(model, |name, _, value: Value<'_, B>| match value.into_data() {
        Ok(data) => values.push(data),
        Err(reason) => {
            problem.get_or_insert_with(|| TrainError::Read { parameter: name.join("."), reason });
        }
    });
    problem.map_or(Ok(values), Err)
}

/// The model with other values, in order, where there are any; what is replaced is a fresh leaf.
pub(crate) fn replace<B: Backend, M: Module<B>>(model: M, values: Vec<Option<TensorData>>) -> M {
    model.map(&mut Replace::<B> { values: values.into_iter(), shared: HashMap::new() })
}

/// The first line in which lists differ.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    differing: usize,
    line: usize,
    given: String,
    expected: String,
}

fn first_difference(lists: &[Vec<String>]) -> Option<Difference> {
    let reference = lists.first()?;
    let num_lines = lists.iter().map(Vec::len).max()?;
    let line_of = |list: &Vec<String>, line: usize| list.get(line).cloned().unwrap_or_else(|| "nothing".into());
    (0..num_lines).find_map(|line| {
        let differing = lists.iter().position(|list| list.get(line) != reference.get(line))?;
        Some(Difference {
            differing,
            line,
            given: line_of(&lists[differing], line),
            expected: line_of(reference, line),
        })
    })
}

/// A tensor of a model while it is visited.
pub(crate) enum Value<'a, B: Backend> {
    Float(&'a TensorPrimitive<B>),
    Int(&'a B::IntTensorPrimitive),
    Bool(&'a B::BoolTensorPrimitive),
}

impl<B: Backend> Value<'_, B> {
    fn shape_and_dtype(&self) -> (Shape, DType) {
        match self {
            Self::Float(tensor) => (tensor.shape(), tensor.dtype()),
            Self::Int(tensor) => (tensor.shape(), tensor.dtype()),
            Self::Bool(tensor) => (tensor.shape(), tensor.dtype()),
        }
    }

    pub(crate) fn requires_gradient(&self) -> bool {
        match self {
            Self::Float(TensorPrimitive::Float(tensor)) => B::float_is_require_grad(tensor),
            Self::Float(TensorPrimitive::QFloat(_)) | Self::Int(_) | Self::Bool(_) => false,
        }
    }

    fn device_if_trained(&self) -> Option<B::Device> {
        match self {
            Self::Float(TensorPrimitive::Float(tensor)) if B::float_is_require_grad(tensor) => {
                Some(B::float_device(tensor))
            }
            Self::Float(_) | Self::Int(_) | Self::Bool(_) => None,
        }
    }

    pub(crate) fn into_data(self) -> Result<TensorData, String> {
        match self {
            Self::Float(tensor) => Tensor::<B, 1>::from_primitive(tensor.clone()).try_into_data(),
            Self::Int(tensor) => Tensor::<B, 1, Int>::from_primitive(tensor.clone()).try_into_data(),
            Self::Bool(tensor) => Tensor::<B, 1, Bool>::from_primitive(tensor.clone()).try_into_data(),
        }
        .map_err(|error| format!("{error:?}"))
    }
}

/// Calls `each` with the path, the id and the value of every tensor, in order.
pub(crate) fn visit<B: Backend, M: Module<B>>(model: &M, each: impl FnMut(&[String], ParamId, Value<'_, B>)) {
    model.visit(&mut Visitor { path: Vec::new(), each, backend: PhantomData::<B> });
}

struct Visitor<B, F> {
    path: Vec<String>,
    each: F,
    backend: PhantomData<B>,
}

impl<B: Backend, F: FnMut(&[String], ParamId, Value<'_, B>)> ModuleVisitor<B> for Visitor<B, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        (self.each)(&self.path, param.id, Value::Float(&param.val().into_primitive()));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        (self.each)(&self.path, param.id, Value::Int(&param.val().into_primitive()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        (self.each)(&self.path, param.id, Value::Bool(&param.val().into_primitive()));
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

struct Replace<B: Backend> {
    values: vec::IntoIter<Option<TensorData>>,
    /// What has been replaced: a tensor that occurs again stays one leaf.
    shared: HashMap<ParamId, TensorPrimitive<B>>,
}

impl<B: Backend> Replace<B> {
    fn next(&mut self) -> Option<TensorData> {
        self.values.next().flatten()
    }
}

impl<B: Backend> ModuleMapper<B> for Replace<B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let data = self.next();
        let (id, tensor, mapper) = param.consume();
        if let Some(shared) = self.shared.get(&id)
            && shared.shape() == tensor.shape()
        {
            return Param::from_mapped_value(id, Tensor::from_primitive(shared.clone()), mapper);
        }
        let Some(data) = data else { return Param::from_mapped_value(id, tensor, mapper) };
        let device = tensor.device();
        let value = match data.dtype {
            DType::QFloat(_) => TensorPrimitive::QFloat(B::q_from_data(data, &device)),
            _ => TensorPrimitive::Float(B::float_from_data(data, &device)),
        };
        let value = Tensor::from_primitive(value).set_require_grad(tensor.is_require_grad());
        self.shared.insert(id, value.clone().into_primitive());
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let Some(data) = self.next() else { return param };
        let (id, tensor, mapper) = param.consume();
        let value = Tensor::from_primitive(B::int_from_data(data, &tensor.device()));
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let Some(data) = self.next() else { return param };
        let (id, tensor, mapper) = param.consume();
        let value = Tensor::from_primitive(B::bool_from_data(data, &tensor.device()));
        Param::from_mapped_value(id, value, mapper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(lists: &[&[&str]]) -> Vec<Vec<String>> {
        lists.iter().map(|list| list.iter().map(|&line| line.into()).collect()).collect()
    }

    #[test]
    fn the_first_line_that_differs_is_named_with_the_lowest_rank_where_it_does() {
        let found = first_difference(&lists(&[&["mean", "a", "b"], &["mean", "a", "c"], &["mean", "b", "b"]]));
        let expected = Difference { differing: 2, line: 1, given: "b".into(), expected: "a".into() };
        assert_eq!(found, Some(expected));
    }

    #[test]
    fn a_parameter_too_many_or_too_few_differs_from_nothing() {
        let found = first_difference(&lists(&[&["mean", "a"], &["mean", "a", "b"]]));
        let expected = Difference { differing: 1, line: 2, given: "b".into(), expected: "nothing".into() };
        assert_eq!(found, Some(expected));
        let found = first_difference(&lists(&[&["mean", "a"], &["mean", "a"], &["mean"]])).map(|found| found.given);
        assert_eq!(found.as_deref(), Some("nothing"));
        assert_eq!(first_difference(&lists(&[&["mean", "a"], &["mean", "a"]])), None);
    }
}
