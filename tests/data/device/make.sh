#!/bin/sh
# Makes the binary files of this directory anew. Needs CUDA 13.0's nvcc and, for the *.txt files,
# cuobjdump 13.2.78 on PATH (or in $CUOBJDUMP). Run it in this directory.
set -eu
fat="nvcc -DDEVICE_ONLY -fatbin --compress-mode=size"
$fat -gencode arch=compute_75,code=sm_75 -o sm75.fatbin scale.cu
$fat -gencode arch=compute_75,code=[sm_75,compute_75] -gencode arch=compute_80,code=sm_80 \
  -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_100f,code=sm_100f \
  -gencode arch=compute_120,code=compute_120 -o many.fatbin scale.cu
$fat -gencode arch=compute_80,code=[sm_80,compute_80] -o sm80.fatbin scale.cu
nvcc -DDEVICE_ONLY -fatbin --compress-mode=none -gencode arch=compute_75,code=[sm_75,compute_75] \
  -o plain.fatbin scale.cu
nvcc -DDEVICE_ONLY -fatbin -dc -gencode arch=compute_75,code=lto_75 -o lto.fatbin scale.cu
nvcc -DDEVICE_ONLY -cubin -arch=sm_75 -o sm75.cubin scale.cu
nvcc -Xcompiler -fPIC -shared -cudart none --compress-mode=size -gencode arch=compute_75,code=sm_75 \
  -o two.so scale.cu offset.cu
nvcc -Xcompiler -fPIC -shared -cudart none -rdc=true -gencode arch=compute_75,code=sm_75 \
  -o relocatable.so scale.cu offset.cu
strip two.so relocatable.so
for file in *.fatbin *.cubin *.so; do
  "${CUOBJDUMP:-cuobjdump}" --list-elf --list-ptx "$file" >"$file.txt" 2>/dev/null || true
done
