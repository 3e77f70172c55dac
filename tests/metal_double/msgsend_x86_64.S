// Message sending on x86-64. The method is found by a function of objc_runtime.cpp, around which every register that
// may hold an argument is saved; then control goes to the method as if it had been called directly. A message to nil
// returns zero in every register that can hold a result.
        .text

// The frame keeps the stack aligned and lets unwinders and sanitizers walk through it.
.macro SAVE_ARGUMENTS
        pushq   %rbp
        .cfi_def_cfa_offset 16
        .cfi_offset %rbp, -16
        movq    %rsp, %rbp
        .cfi_def_cfa_register %rbp
        subq    $192, %rsp
        movq    %rdi, 0(%rsp)
        movq    %rsi, 8(%rsp)
        movq    %rdx, 16(%rsp)
        movq    %rcx, 24(%rsp)
        movq    %r8, 32(%rsp)
        movq    %r9, 40(%rsp)
        movq    %rax, 48(%rsp)
        movups  %xmm0, 64(%rsp)
        movups  %xmm1, 80(%rsp)
        movups  %xmm2, 96(%rsp)
        movups  %xmm3, 112(%rsp)
        movups  %xmm4, 128(%rsp)
        movups  %xmm5, 144(%rsp)
        movups  %xmm6, 160(%rsp)
        movups  %xmm7, 176(%rsp)
.endm

.macro RESTORE_ARGUMENTS_AND_JUMP
        movq    %rax, %r11
        movq    0(%rsp), %rdi
        movq    8(%rsp), %rsi
        movq    16(%rsp), %rdx
        movq    24(%rsp), %rcx
        movq    32(%rsp), %r8
        movq    40(%rsp), %r9
        movq    48(%rsp), %rax
        movups  64(%rsp), %xmm0
        movups  80(%rsp), %xmm1
        movups  96(%rsp), %xmm2
        movups  112(%rsp), %xmm3
        movups  128(%rsp), %xmm4
        movups  144(%rsp), %xmm5
        movups  160(%rsp), %xmm6
        movups  176(%rsp), %xmm7
        leave
        .cfi_def_cfa %rsp, 8
        jmp     *%r11
.endm

.macro FUNCTION name
        .globl  \name
        .hidden \name
        .type   \name, @function
        .p2align 4
\name:
        .cfi_startproc
.endm

.macro END_FUNCTION name
        .cfi_endproc
        .size   \name, .-\name
.endm

// id objc_msgSend(id receiver, SEL selector, ...)
FUNCTION objc_msgSend
        testq   %rdi, %rdi
        jz      1f
        SAVE_ARGUMENTS
        call    lily_objc_lookup
        RESTORE_ARGUMENTS_AND_JUMP
        .cfi_def_cfa %rsp, 8
1:      xorl    %eax, %eax
        xorl    %edx, %edx
        xorps   %xmm0, %xmm0
        xorps   %xmm1, %xmm1
        ret
END_FUNCTION objc_msgSend

// As above for results in memory, whose address comes first. For nil the caller clears that memory.
FUNCTION objc_msgSend_stret
        testq   %rsi, %rsi
        jz      1f
        SAVE_ARGUMENTS
        movq    %rsi, %rdi
        movq    %rdx, %rsi
        call    lily_objc_lookup
        RESTORE_ARGUMENTS_AND_JUMP
        .cfi_def_cfa %rsp, 8
1:      movq    %rdi, %rax
        ret
END_FUNCTION objc_msgSend_stret

// id objc_msgSendSuper2(SuperCall* call, SEL selector, ...)
FUNCTION objc_msgSendSuper2
        SAVE_ARGUMENTS
        call    lily_objc_lookup_super
        movq    0(%rsp), %rdi
        movq    (%rdi), %rdi
        movq    %rdi, 0(%rsp)
        RESTORE_ARGUMENTS_AND_JUMP
END_FUNCTION objc_msgSendSuper2

        .section .note.GNU-stack,"",@progbits
