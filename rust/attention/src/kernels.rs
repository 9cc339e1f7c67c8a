//! The kernels as compiled for each instruction set, and the choice between them at run time.

use std::sync::OnceLock;

use crate::ahead::Ahead;
use crate::element::{Brain, Byte, Element, Half, Single, Small};
use crate::gather::Gather;
use crate::product::Product;
use crate::query;
use crate::score::Score;
use crate::simd::portable::Portable;
use crate::simd::{Arithmetic, Simd};
use crate::softmax::Softmax;
use crate::sum::Sum;
use crate::view::Format;

/// Which instructions the kernels may use. A set that the machine lacks falls back to the next best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// What the compiler's target has: SSE2, NEON.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// AVX-512 with products of bf16; for caches of 8 bits VBMI is needed, too.
    Avx512Bf16,
    /// The same, and products of bytes (VNNI) for caches of int8.
    Avx512Vnni,
}

impl InstructionSet {
    /// The best that this machine has.
    pub fn detect() -> InstructionSet {
        static BEST: OnceLock<InstructionSet> = OnceLock::new();
        *BEST.get_or_init(|| {
            let all = [
                InstructionSet::Avx512Vnni,
                InstructionSet::Avx512Bf16,
                InstructionSet::Avx512,
                InstructionSet::Avx2,
            ];
            all.into_iter().find(|set| set.is_available()).unwrap_or(InstructionSet::Portable)
        })
    }

    /// Its name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            InstructionSet::Portable if cfg!(target_arch = "aarch64") => "neon",
            InstructionSet::Portable => "portable",
            InstructionSet::Avx2 => "avx2",
            InstructionSet::Avx512 => "avx512",
            InstructionSet::Avx512Bf16 => "avx512_bf16",
            InstructionSet::Avx512Vnni => "avx512_vnni",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            InstructionSet::Portable => true,
            InstructionSet::Avx2 => crate::simd::avx2::Avx2::detect(),
            InstructionSet::Avx512 => crate::simd::avx512::Avx512::detect(),
            InstructionSet::Avx512Bf16 => crate::simd::avx512_bf16::Avx512Bf16::detect(),
            InstructionSet::Avx512Vnni => crate::simd::avx512_vnni::Avx512Vnni::detect(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == InstructionSet::Portable
    }
}

/// The kernels for one cache format and one way to multiply.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    /// Singles in a vector.
    pub(crate) lanes: usize,
    /// Keys that are scored at a time.
    pub(crate) scored_keys: usize,
    /// Values in a 32-bit lane: 1 for singles, 2 for bf16, 4 for bytes.
    pub(crate) values: usize,
    /// The words of a packed row of so many numbers, which queries and weights are.
    pub(crate) packed_words: fn(usize) -> usize,
    /// Packs a query; see [`crate::query::pack`].
    pub(crate) pack_query: unsafe fn(*const u8, Format, usize, *mut u32),
    /// See [`crate::score::score`].
    pub(crate) score: unsafe fn(&Score, &mut Ahead),
    /// See [`crate::softmax::soften`].
    pub(crate) soften: unsafe fn(&Softmax, &mut Ahead),
    /// See [`crate::sum::sum`].
    pub(crate) sum: unsafe fn(&Sum, &mut Ahead),
    /// How values are summed for many rows; without, as for few.
    pub(crate) many_rows: Option<ManyRows>,
}

/// The kernels that copy values first, so that many rows read the copies.
#[derive(Clone, Copy)]
pub(crate) struct ManyRows {
    /// See [`crate::gather::gather_values`].
    pub(crate) gather_values: unsafe fn(&Gather, &mut Ahead),
    /// See [`crate::product::multiply`].
    pub(crate) multiply: unsafe fn(&Product, &mut Ahead),
}

impl Kernels {
    /// The kernels for a query and a cache of these formats and this head size of keys, with no more than these
    /// instructions.
    ///
    /// Where query and cache both fit bf16 they are multiplied as whole numbers (int8 alone) or as bf16 if the machine
    /// can, otherwise as singles. For bf16 and 8 bits it must be able to look bytes up as well.
    pub(crate) fn choose(query: Format, cache: Format, head_dim: usize, limit: InstructionSet) -> Kernels {
        let set = limit.min(InstructionSet::detect());
        #[cfg(target_arch = "x86_64")]
        match set {
            InstructionSet::Avx512Vnni
                if query == Format::Bf16 && cache == Format::Int8 && head_dim <= whole::MOST_VALUES =>
            {
                return whole_numbers::kernels();
            }
            InstructionSet::Avx512Bf16 | InstructionSet::Avx512Vnni
                if query == Format::Bf16 && cache == Format::Bf16 =>
            {
                return of_avx512_bf16(cache);
            }
            InstructionSet::Avx512Bf16 | InstructionSet::Avx512Vnni
                if query == Format::Bf16
                    && matches!(cache, Format::Int8 | Format::Fp8)
                    && Avx512Bf16::detect_bytes() =>
            {
                return of_avx512_bytes(cache);
            }
            InstructionSet::Avx512Vnni | InstructionSet::Avx512Bf16 | InstructionSet::Avx512 => {
                return of_avx512(cache);
            }
            InstructionSet::Avx2 => return of_avx2(cache),
            InstructionSet::Portable => {}
        }
        let _ = (set, query, head_dim);
        of_portable(cache)
    }
}

/// Compiles the kernels for one arithmetic; `$token` makes the proof that the machine has it.
macro_rules! compile {
    ($table:ident, $module:ident, $arithmetic:ty, $token:expr, [$($format:ident => $element:ty),*$(; $other:pat)?], $(#[$features:meta])*) => {
        mod $module {
            use super::*;

            /// # Safety
            /// See [`crate::score::score`]; the machine has the instructions.
            $(#[$features])*
            unsafe fn score<E: Element>(job: &Score, ahead: &mut Ahead) {
                // SAFETY: the same contract.
                unsafe { crate::score::score::<$arithmetic, E>($token, job, ahead) }
            }

            /// # Safety
            /// See [`crate::gather::gather_values`]; the machine has the instructions.
            $(#[$features])*
            unsafe fn gather_values<E: Element>(job: &Gather, ahead: &mut Ahead) {
                // SAFETY: the same contract.
                unsafe { crate::gather::gather_values::<$arithmetic, E>($token, job, ahead) }
            }

            /// # Safety
            /// See [`crate::product::multiply`]; the machine has the instructions.
            $(#[$features])*
            unsafe fn multiply(job: &Product, ahead: &mut Ahead) {
                // SAFETY: the same contract.
                unsafe { crate::product::multiply::<$arithmetic>($token, job, ahead) }
            }

            /// # Safety
            /// See [`crate::softmax::soften`]; the machine has the instructions.
            $(#[$features])*
            unsafe fn soften(job: &Softmax, ahead: &mut Ahead) {
                // SAFETY: the same contract.
                unsafe { crate::softmax::soften::<$arithmetic>($token, job, ahead) }
            }

            /// # Safety
            /// See [`crate::sum::sum`]; the machine has the instructions.
            $(#[$features])*
            unsafe fn sum<E: Element>(job: &Sum, ahead: &mut Ahead) {
                // SAFETY: the same contract.
                unsafe { crate::sum::sum::<$arithmetic, E>($token, job, ahead) }
            }

            fn kernels<E: Element>() -> Kernels {
                Kernels {
                    lanes: <$arithmetic>::LANES,
                    scored_keys: <$arithmetic>::LANES,
                    values: <$arithmetic>::VALUES,
                    packed_words: query::packed_words::<{ <$arithmetic>::VALUES }>,
                    pack_query: query::pack::<{ <$arithmetic>::VALUES }>,
                    score: score::<E>,
                    soften,
                    sum: sum::<E>,
                    many_rows: Some(ManyRows { gather_values: gather_values::<E>, multiply }),
                }
            }

            pub(super) fn $table(format: Format) -> Kernels {
                match format {
                    $(Format::$format => kernels::<$element>(),)*
                    $($other => unreachable!("no kernel for {format:?}"),)?
                }
            }
        }
        use $module::$table;
    };
}

compile!(
    of_portable, portable, Portable, Portable::assume(),
    [F32 => Single, Bf16 => Brain, F16 => Half, Int8 => Byte, Fp8 => Small],
);

#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512, avx512_bf16::Avx512Bf16, avx512_vnni::Avx512Vnni};
#[cfg(target_arch = "x86_64")]
use crate::whole;

#[cfg(target_arch = "x86_64")]
compile!(
    of_avx2, avx2, Avx2, Avx2::assume(),
    [F32 => Single, Bf16 => Brain, F16 => Half, Int8 => Byte, Fp8 => Small],
    #[target_feature(enable = "avx2,fma,f16c")]
);

#[cfg(target_arch = "x86_64")]
compile!(
    of_avx512, avx512, Avx512, Avx512::assume(),
    [F32 => Single, Bf16 => Brain, F16 => Half, Int8 => Byte, Fp8 => Small],
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
);

#[cfg(target_arch = "x86_64")]
compile!(
    of_avx512_bf16, avx512_bf16, Avx512Bf16, Avx512Bf16::assume(),
    [Bf16 => Brain; Format::F32 | Format::F16 | Format::Int8 | Format::Fp8],
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")]
);

#[cfg(target_arch = "x86_64")]
compile!(
    of_avx512_bytes, avx512_bytes, Avx512Bf16, Avx512Bf16::assume(),
    [Int8 => Byte, Fp8 => Small; Format::F32 | Format::F16 | Format::Bf16],
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,fma,f16c")]
);

/// The kernels of [`whole`] numbers, compiled for their instructions.
#[cfg(target_arch = "x86_64")]
mod whole_numbers {
    use super::*;

    macro_rules! compile_whole {
        ($($name:ident = $kernel:path, ($($argument:ident: $type:ty),*);)*) => {$(
            /// # Safety
            /// See the kernel of this name; the machine has the instructions.
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")]
            unsafe fn $name($($argument: $type),*) {
                // SAFETY: the same contract.
                unsafe { $kernel(Avx512Vnni::assume(), $($argument),*) }
            }
        )*};
    }

    compile_whole! {
        pack = whole::digits::pack_query, (row: *const u8, format: Format, head_dim: usize, to: *mut u32);
        score = whole::score::score, (job: &Score, ahead: &mut Ahead);
        soften = crate::softmax::soften, (job: &Softmax, ahead: &mut Ahead);
        sum = whole::sum::sum, (job: &Sum, ahead: &mut Ahead);
    }

    pub(super) fn kernels() -> Kernels {
        Kernels {
            lanes: Avx512Vnni::LANES,
            scored_keys: whole::score::KEYS,
            values: whole::sum::POSITIONS,
            packed_words: whole::digits::packed_words,
            pack_query: pack,
            score,
            soften,
            sum,
            many_rows: None,
        }
    }
}
