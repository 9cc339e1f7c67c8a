//! The CPU kernels of pykv-attention. Tensors come as (address, shape, strides in numbers, format).

use std::panic::{AssertUnwindSafe, catch_unwind};

use pykv_attention::{
    ActivationView, Attention, AttentionCall, CacheView, Error, Format, InstructionSet, LogSumExpView,
    Options, Scales, ScalesView, StepView, WriteCall,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::PoisonedError;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuAttention>()
}

type Activation = (usize, (usize, usize, usize), (isize, isize, isize), u8);
type Cache = (usize, (usize, usize, usize, usize), (isize, isize, isize, isize), u8);
/// Address and strides of scales [num_blocks, 2, num_kv_heads, block_size].
type TokenScales = (usize, (isize, isize, isize, isize));
/// Address and length of a contiguous array.
type Array = (usize, usize);

/// Block tables, sequence lengths, query starts, table rows.
type Step = ((usize, (usize, usize), (isize, isize)), Array, Array, Option<Array>);

/// Attention on the CPU: its threads and scratch memory.
#[pyclass(frozen, module = "pykv._core")]
struct CpuAttention {
    attention: Attention,
    instructions: InstructionSet,
}

#[pymethods]
impl CpuAttention {
    /// `instructions` is the most that may be used: "portable", "avx2", "avx512", "avx512_bf16", "avx512_vnni";
    /// None: all there are.
    #[new]
    #[pyo3(signature = (instructions = None))]
    fn new(instructions: Option<&str>) -> PyResult<CpuAttention> {
        let instructions = instructions.map_or(Ok(InstructionSet::detect()), instruction_set)?;
        Ok(CpuAttention { attention: Attention::new(), instructions })
    }

    /// The name of the instructions that are used.
    #[getter]
    fn instructions(&self) -> &'static str {
        self.instructions.min(InstructionSet::detect()).name()
    }

    /// Fills `out`. The caller keeps the tensors alive and lets nobody write them meanwhile.
    #[pyo3(signature = (
        query, key_cache, value_cache, out, step, scale, window, softcap, sinks, tensor_scales, token_scales,
        log_sum_exp, num_threads, share_prefixes,
    ))]
    #[expect(clippy::too_many_arguments, reason = "positional arguments are the cheapest way in")]
    fn paged_attention(
        &self,
        py: Python<'_>,
        query: Activation,
        key_cache: Cache,
        value_cache: Cache,
        out: Activation,
        step: Step,
        scale: f32,
        window: Option<usize>,
        softcap: Option<f32>,
        sinks: Option<Array>,
        tensor_scales: Option<(f32, f32)>,
        token_scales: Option<TokenScales>,
        log_sum_exp: Option<(usize, (isize, isize))>,
        num_threads: usize,
        share_prefixes: bool,
    ) -> PyResult<()> {
        // SAFETY: Python's side took addresses and sizes from tensors that it holds until this returns.
        let (step, sinks) = unsafe { (step_view(step), sinks.map(|sinks| slice(sinks))) };
        let call = AttentionCall {
            query: activation(query)?,
            key_cache: cache(key_cache)?,
            value_cache: cache(value_cache)?,
            scales: scales(tensor_scales, token_scales),
            out: activation(out)?,
            log_sum_exp: log_sum_exp.map(|(address, (token, head))| LogSumExpView {
                address: address as _,
                strides: [token, head],
            }),
            step,
            options: Options { scale, window, softcap, sinks },
            num_threads,
            share_prefixes,
            instructions: self.instructions,
        };
        // SAFETY: as above; the views have the tensors' shapes and strides.
        run(py, || unsafe { self.attention.paged_attention(&call) })
    }

    /// Writes each token's key and value to its slot.
    #[pyo3(signature = (key, value, key_cache, value_cache, slots, tensor_scales, token_scales, num_threads))]
    #[expect(clippy::too_many_arguments, reason = "positional arguments are the cheapest way in")]
    fn write_kv(
        &self,
        py: Python<'_>,
        key: Activation,
        value: Activation,
        key_cache: Cache,
        value_cache: Cache,
        slots: Array,
        tensor_scales: Option<(f32, f32)>,
        token_scales: Option<TokenScales>,
        num_threads: usize,
    ) -> PyResult<()> {
        let call = WriteCall {
            key: activation(key)?,
            value: activation(value)?,
            key_cache: cache(key_cache)?,
            value_cache: cache(value_cache)?,
            scales: scales(tensor_scales, token_scales),
            // SAFETY: Python's side took address and length from a tensor that it holds until this returns.
            slots: unsafe { slice(slots) },
            num_threads,
        };
        // SAFETY: as above; the views have the tensors' shapes and strides.
        run(py, || unsafe { self.attention.write_kv(&call) })
    }

    /// Copies each pair's first block to its second, in every cache. Python's side checked that no target comes twice
    /// or is a source.
    fn copy_blocks(
        &self,
        py: Python<'_>,
        caches: Vec<Cache>,
        pairs: Array,
        num_threads: usize,
    ) -> PyResult<()> {
        let caches = caches.into_iter().map(cache).collect::<PyResult<Vec<_>>>()?;
        // SAFETY: Python's side took address and length from a tensor that it holds until this returns.
        let pairs: &[[i64; 2]] = unsafe { slice(pairs) };
        // SAFETY: as above; the views have the tensors' shapes and strides, and the pairs' targets are apart.
        run(py, || unsafe { self.attention.copy_blocks(&caches, pairs, num_threads) })
    }

    /// Copies each pair's first block of a source to its second block of the target at the same place. Python's side
    /// checked that no target comes twice, and that sources and targets share no memory.
    fn transfer_blocks(
        &self,
        py: Python<'_>,
        sources: Vec<Cache>,
        targets: Vec<Cache>,
        pairs: Array,
        num_threads: usize,
    ) -> PyResult<()> {
        let sources = sources.into_iter().map(cache).collect::<PyResult<Vec<_>>>()?;
        let targets = targets.into_iter().map(cache).collect::<PyResult<Vec<_>>>()?;
        // SAFETY: Python's side took address and length from a tensor that it holds until this returns.
        let pairs: &[[i64; 2]] = unsafe { slice(pairs) };
        // SAFETY: as above; the views have the tensors' shapes and strides, and the pairs' targets are apart.
        run(py, || unsafe { self.attention.transfer_blocks(&sources, &targets, pairs, num_threads) })
    }

    /// Reads `num_words` words of 8 bytes and returns their combination by exclusive or.
    fn read(&self, py: Python<'_>, address: usize, num_words: usize, num_threads: usize) -> PyResult<u64> {
        // SAFETY: Python's side took address and length from a tensor that it holds until this returns.
        let words: &[u64] = unsafe { slice((address, num_words)) };
        run(py, || self.attention.read(words, num_threads))
    }
}

/// Runs a kernel with the interpreter detached.
fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, Error> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(Error::Poisoned)) => Err(PoisonedError::new_err(Error::Poisoned.to_string())),
        Ok(Err(error)) => Err(PyValueError::new_err(error.to_string())),
        Err(_) => Err(PoisonedError::new_err("the CPU attention panicked")),
    }
}

fn instruction_set(name: &str) -> PyResult<InstructionSet> {
    let all = [
        InstructionSet::Portable,
        InstructionSet::Avx2,
        InstructionSet::Avx512,
        InstructionSet::Avx512Bf16,
        InstructionSet::Avx512Vnni,
    ];
    all.into_iter().find(|set| set.name() == name).ok_or_else(|| {
        let names = all.map(InstructionSet::name).join(", ");
        PyValueError::new_err(format!("instructions is {name:?}: allowed are {names}"))
    })
}

fn format(code: u8) -> PyResult<Format> {
    match code {
        0 => Ok(Format::F32),
        1 => Ok(Format::Bf16),
        2 => Ok(Format::F16),
        3 => Ok(Format::Int8),
        4 => Ok(Format::Fp8),
        _ => Err(PyValueError::new_err(format!("format code {code} is unknown"))),
    }
}

fn activation((address, shape, strides, code): Activation) -> PyResult<ActivationView> {
    let format = format(code)?;
    let bytes = format.bytes() as isize;
    Ok(ActivationView {
        address: address as *mut u8,
        shape: [shape.0, shape.1],
        head_dim: shape.2,
        strides: [strides.0 * bytes, strides.1 * bytes],
        format,
    })
}

fn cache((address, shape, strides, code): Cache) -> PyResult<CacheView> {
    let format = format(code)?;
    let bytes = format.bytes() as isize;
    Ok(CacheView {
        address: address as *mut u8,
        shape: [shape.0, shape.1, shape.2],
        head_dim: shape.3,
        strides: [strides.0 * bytes, strides.1 * bytes, strides.2 * bytes],
        format,
    })
}

fn scales(tensor: Option<(f32, f32)>, token: Option<TokenScales>) -> Scales {
    match (tensor, token) {
        (Some((key, value)), _) => Scales::Tensor { key, value },
        (None, Some((address, strides))) => Scales::Token(ScalesView {
            address: address as *mut f32,
            strides: [strides.0, strides.1, strides.2, strides.3],
        }),
        (None, None) => Scales::None,
    }
}

/// # Safety
/// The arrays are those of live tensors of int32.
unsafe fn step_view<'a>((tables, seq_lens, query_starts, table_rows): Step) -> StepView<'a> {
    let (address, (num_table_rows, num_columns), (table_stride, _)) = tables;
    let table_stride = table_stride.unsigned_abs();
    let len =
        if num_columns == 0 { 0 } else { num_table_rows.saturating_sub(1) * table_stride + num_columns };
    // SAFETY: by this function's contract.
    unsafe {
        StepView {
            block_tables: slice((address, if num_table_rows == 0 { 0 } else { len })),
            num_table_rows,
            table_stride,
            num_columns,
            seq_lens: slice(seq_lens),
            query_starts: slice(query_starts),
            table_rows: table_rows.map(|rows| slice(rows)),
        }
    }
}

/// # Safety
/// `length` entries of a live tensor start at `address`.
unsafe fn slice<'a, T>((address, length): Array) -> &'a [T] {
    if length == 0 {
        return &[];
    }
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts(address as *const T, length) }
}
