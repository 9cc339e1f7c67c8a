//! The formats as types, so that a kernel is compiled once for each.

use crate::view::Format;

/// A format that a cache can have.
pub(crate) trait Element: Copy + 'static {
    const FORMAT: Format;

    /// The number that starts at `from`.
    ///
    /// # Safety
    /// A number of this format can be read there.
    unsafe fn read(from: *const u8) -> f32;
}

macro_rules! elements {
    ($($name:ident, $format:ident, $raw:ty, $widen:expr;)*) => {$(
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Element for $name {
            const FORMAT: Format = Format::$format;

            #[inline(always)]
            unsafe fn read(from: *const u8) -> f32 {
                // SAFETY: by this function's contract; the read may be unaligned.
                let raw = unsafe { from.cast::<$raw>().read_unaligned() };
                $widen(raw)
            }
        }
    )*};
}

elements! {
    Single, F32, f32, |raw| raw;
    Brain, Bf16, u16, |raw| half::bf16::from_bits(raw).to_f32();
    Half, F16, u16, |raw| half::f16::from_bits(raw).to_f32();
    Byte, Int8, i8, f32::from;
    Small, Fp8, u8, widen_fp8;
}

/// What a byte of e4m3 stands for.
pub(crate) fn widen_fp8(byte: u8) -> f32 {
    const TWO_TO_120: f32 = f32::from_bits((120 + 127) << 23);
    let magnitude = byte & 0x7f;
    let value = match magnitude {
        0x7f => f32::NAN,
        0..8 => f32::from(magnitude) / 512.0,
        _ => f32::from_bits(u32::from(magnitude) << 20) * TWO_TO_120,
    };
    if byte & 0x80 == 0 { value } else { -value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_covers_its_range() {
        assert_eq!(widen_fp8(0x7e), 448.0);
        assert_eq!(widen_fp8(0x01), 2f32.powi(-9));
        assert_eq!(widen_fp8(0x08), 2f32.powi(-6));
        assert_eq!(widen_fp8(0xb8), -1.0);
        assert!(widen_fp8(0xff).is_nan());
        assert!(widen_fp8(0x80).is_sign_negative());
    }

    #[test]
    fn fp8_rises_with_its_code() {
        for byte in 0..0x7e {
            assert!(widen_fp8(byte) < widen_fp8(byte + 1));
        }
    }
}
